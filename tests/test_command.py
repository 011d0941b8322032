"""Settings on the command line and in config files: a mistake is one line, before torch."""

import os
import re
from itertools import pairwise

import pytest

from common.console import escape
from common.errors import ConfigError
from configs.command import StartOptions, parse_sample_options, parse_train, to_yaml
from configs.fields import settings_of
from configs.schema import LAYOUTS, Config, DataConfig, SampleConfig, suggest_setting
from tests.commands import exit_code, train_main
from tests.conftest import ROOT, printed
from tests.texts import write

SMOKE = str(ROOT / "configs/smoke.yaml")
SHIPPED = sorted(ROOT.glob("configs/*.yaml"))

# faults.md, section A: the content of a config file, and words of the message
INVALID_FILES = [
    # a config that is empty or not a mapping
    ("# only a comment\n", "is empty; give at least one setting"),
    ("- seed\n", "must be lines of key: value"),
    ("model: 6\n", "line 1: model must be a mapping"),
    (b"# caf\xe9\nseed: 1\n", "not UTF-8 at byte 5"),
    # unknown keys
    ("seed: 1\nmodel:\n  n_heads: 4\n", "line 3: unknown key 'n_heads'; did you mean n_head below"),
    ("model: {hidden_size: 4}\n", "did you mean n_embd below model?"),
    ("model.n_head: 4\n", "unknown key 'model.n_head'; did you mean n_head below model?"),
    ("sead: 4\n", "unknown key 'sead'; did you mean seed?"),
    ("zzz: 4\n", "unknown key 'zzz'; python train.py --help lists all"),
    ('"\\e[2J": 1\n', r"unknown key '\x1b[2J'"),
    # wrong types, ranges and choices
    ("model: {n_layer: 6.5}\n", "n_layer must be an integer of at least 1, but is 6.5"),
    ("model: {n_layer: 0}\n", "but is 0"),
    ("model: {dropout: 1}\n", "must be auto or a number of at least 0 and less than 1, but is 1.0"),
    ("model: {attention: flsh}\n", f"must be one of {', '.join(LAYOUTS)}, but is 'flsh'"),
    ("compile: yes\n", "compile must be true or false, but is 'yes'"),
    ("seed: {a: 1}\n", "must be an integer of at least 0 and at most 4294967295, but is a mapping"),
    ("data: {sources: []}\n", "sources must be one string or several, but is []"),
    ("data: {sources: http://example.org/a.txt}\n", "https://HOST/FOLDER/FILE#sha256="),
    ("data: {encoding: utf8x}\n", "encoding: Python has no text encoding 'utf8x'"),
    ("data: {answer_after: =}\n", "answer_after '=' needs items that end: set separator too"),
    # what YAML reads as a number elsewhere, and no value
    ("train: {batch_size: 1:30}\n", "must be an integer of at least 1, but is '1:30'"),
    ("model: {dropout: on}\n", "but is 'on'"),
    ("train: {learning_rate: .nan}\n", "but is '.nan'"),
    ("train: {grad_clip: .inf}\n", "but is '.inf'"),
    ("train:\n  learning_rate:\n", "line 2: learning_rate must be a number of more than 0"),
    # YAML that is refused
    ("seed: 1\nmodel: {}\nseed: 2\n", "line 3: duplicate key 'seed', as in line 1; keep one"),
    ("model:\n\tn_layer: 4\n", "line 2: ", "check the indentation (spaces only)"),
    ("model:\n  n_layer:4\n  n_head: 4\n", "line 3: ", "write a space after 'n_layer:'"),
    ("seed: 1\nmodel: {n_head: ]}\n", "line 2: ", "quotes and brackets"),
    ("seed: 1\nmodel: {n_head: 4,\n  n_head: 4}\n", "line 3: duplicate key 'n_head', as in line 2"),
    # settings that do not fit together
    ("model: {n_embd: 384, n_head: 5}\n",
     "n_embd 384 is not divisible by n_head 5; nearest n_head: 6, 4"),
    ("model: {positions: rope, n_embd: 12}\n", "the head size is 3", "choose an even head size"),
    ("train: {warmup_ratio: 0.3}\n", "warmup_ratio 0.3 + cooldown_ratio 0.857143 is more than the "
     "whole run; use --cooldown_ratio=0.7 or less"),
    # names of other projects
    ("train:\n  warmup_iters : 100\n",
     "line 2: unknown key 'warmup_iters'; did you mean warmup_ratio below train? (a share of the"),
]  # fmt: skip

VALUES = [  # a value is a string that the type of its setting parses
    ("model: {n_layer: 6.0}\n", "model.n_layer", 6),
    ("train: {learning_rate: 1e-3}\n", "train.learning_rate", 0.001),
    ("train: {max_iters: 3e4}\n", "train.max_iters", 30_000),
    ("seed: 010\n", "seed", 10),  # as Python's int() and YAML 1.2 have it; PyYAML has 8
    ("\ufeffseed: '7'\n", "seed", 7),
    ("compile: True\n", "compile", True),
    ("out_dir: null\n", "out_dir", "null"),
    ("data: {sources: book.txt}\n", "data.sources", ("book.txt",)),
    ("data: {sources: [a, b]}\n", "data.sources", ("a", "b")),
    ('data: {separator: "\\n"}\n', "data.separator", "\\n"),
    ("seed: &a 7\ntrain: {max_iters: *a}\n", "train.max_iters", 7),
    ("train: {schedule: cosine, warmup_ratio: 1}\n", "train.warmup_ratio", 1.0),
    ("train: {warmup_ratio: 0.3, cooldown_ratio: 0.7}\n", "train.cooldown_ratio", 0.7),
]
# each list has nine times the strings of the one before
BOMB = (
    "a: &a [x]\n"
    + "".join(f"{name}: &{name} [{f'*{before}, ' * 9}]\n" for before, name in pairwise("abcd"))
    + "data: {sources: *d}\n"
)
YAML_TEXTS = [  # the kinds of text of the yaml-test-suite: documents, scalars, collections, tags
    "", "---\n", "---\nseed: 1\n...\n", "seed: 1\n---\nseed: 2\n", "%YAML 1.2\n---\nseed: 1\n",
    "%YAML 9.9\n---\nseed: 1\n", "%TAG !e! tag:example.org,2000:\n---\nseed: !e!a 1\n", "%WHAT\n",
    "seed: |\n  5\n", "seed: >-\n  5\n", "out_dir: |2+\n   a\n\n", "out_dir: 'a''b'\n",
    'out_dir: "a\\\n  b"\n', 'out_dir: "\\Uffffffff"\n', 'out_dir: "\\q"\n', "out_dir: 'a\n",
    "out_dir: a\n  b\n", "out_dir: @a\n", "out_dir: `a`\n", "out_dir: %a\n", "out_dir: a #b\n",
    "out_dir: a: b\n", "? seed\n: 1\n", "? [a]\n: 1\n", "? {a: 1}\n: 1\n", "? |\n  seed\n: 1\n",
    ": 1\n", "seed\n", "[seed, 1]\n", "{seed: 1}\n", "{seed: 1,}\n", "{seed}\n", "{seed: 1\n",
    "seed: [1\n", "seed: 1]\n", "- seed: 1\n", "- - a\n", "data:\n  sources:\n  - a\n",
    "data:\n  sources: [[a]]\n", "data: {sources: [{a: 1}]}\n", "model:\n n_head: 4\n  n_embd: 8\n",
    "model:\n\tn_head: 4\n", "seed:\t1\n", "seed: 1\r\ncompile: true\r\n", "seed: 1\x85\n",
    "seed: \x00\n", "seed: \x1b[2J\n", "\ufeffseed: 1\n", "seed: *a\n", "seed: &a [*a]\n",
    "&a seed: 1\n", "*a : 1\n", "seed: &a\n", "<<: {seed: 1}\n",
    "model: &a {n_head: 4}\ntrain: *a\n", "seed: !!int 1\n", "seed: !!binary aGk=\n",
    "!!set {seed}\n", "!!omap [seed: 1]\n", "!!python/dict {seed: 1}\n", "seed: !!python/none\n",
    "seed: !!python/object/apply:os.mkdir [constructed]\n", "seed: !!python/name:os.mkdir\n",
    "seed: !!python/object/new:tests.texts.write [constructed, x]\n", "[" * 999, "- " * 999,
    "{a: " * 999,
    BOMB,
]  # fmt: skip

TRAIN_OPTIONS = [  # arguments, setting, value
    (["--model.n_layer=3"], "model.n_layer", 3),
    (["--n_layer=4", "--n-layer", "3"], "model.n_layer", 3),  # the last one counts
    (["--train.max-iters=1e4"], "train.max_iters", 10_000),
    (["--compile"], "compile", True),
    (["--dropout=auto"], "model.dropout", "auto"),
    (["--sources=a, b.txt", "--data.sources=[c"], "data.sources", ("a, b.txt", "[c")),
    ([], "out_dir", "out/smoke"),
    (["--out_dir=a=b=c"], "out_dir", "a=b=c"),
]
WORDS = [  # what is no setting of a run
    (parse_train, [SMOKE, "--resume"], "resume", True),
    (parse_train, ["--resume", SMOKE], "resume", True),  # the config is not its value
    (parse_train, [SMOKE, "--resume=false"], "resume", False),
    (parse_train, [SMOKE, "--minutes", "1e1"], "minutes", 10.0),
    (parse_sample_options, ["--ckpt=x", "--prompt", ""], "prompt", ""),
    (parse_sample_options, ["--ckpt=x", "--prompt", "-"], "prompt", "-"),
    (parse_sample_options, ["--score", "-", "--ckpt=x"], "score", "-"),
    (parse_sample_options, ["--ckpt=x", "--prompt=--help me"], "prompt", "--help me"),
    (parse_sample_options, ["--ckpt=x", "--prompt", "--n-a b"], "prompt", "--n-a b"),
    (parse_sample_options, ["--ckpt=x", "--prompt=a-b=c\n"], "prompt", "a-b=c\n"),
    (parse_sample_options, ["--ckpt=x", "--temperature", "0"], "temperature", 0.0),
    (parse_sample_options, ["--ckpt=x", "--stop=[", "--stop=a\\nb"], "stop", ("[", "a\nb")),
]

INVALID_TRAIN_OPTIONS = [  # arguments after the config, and words of the message
    (["--train.n_head=4"], "unknown option '--train.n_head'; did you mean --n_head?"),
    (["--\x1b[2J=4"], r"unknown option '--\x1b[2J'"),
    (["--epochs=3"], "did you mean --max_iters? (max_iters counts steps, not epochs)"),
    (["--lr=1"], "did you mean --learning_rate? (with optimizer muon, also --muon_learning_rate)"),
    (["--warmup_iters=100"], "did you mean --warmup_ratio? (a share of the run, not steps)"),
    (["--cooldown-iters", "9"], "did you mean --cooldown_ratio? (a share of the run, not steps)"),
    (["--num-layers=3"], "unknown option '--num-layers'; did you mean --n_layer?"),
    (["-n", "3"], "unknown option '-n'"),
    (["--n_lay=3"], "unknown option '--n_lay'; did you mean --n_layer?"),
    (["--max_iters=-5"], "--max_iters: max_iters must be an integer of at least 1, but is -5"),
    (["--n_layer", "-1"], "--n_layer: n_layer must be an integer of at least 1, but is -1"),
    (["--max_iters", "-1e3"], "write --max_iters=VALUE, also for a value that begins with a dash"),
    (["--schedule=trapezoid"], "use --cooldown_ratio=0.8333 or less"),
    (["--n_head=5"], f"{SMOKE} and the options: n_embd 64 is not divisible"),
    (["--seed", "--compile"], "--seed: has no value; it must be an integer", "write --seed=VALUE"),
    (["--resume", "--overwrite"], "--resume and --overwrite contradict each other"),
    (["--minutes=1", "--max_iters=9"], "--minutes and --max_iters contradict each other"),
    (["--resume", "--minutes=1", "--max_iters=9"], "contradict each other"),
    (["--allow-data-change"], "--allow_data_change only applies together with --resume"),
    (["--new-characters=add"], "--new_characters only applies together with --init_from"),
    # a name alone never takes the next argument as its value
    (["--compile", "false"], "takes one config file", "'false']", "has its value after ="),
    (["--resume=out/a"], "--resume: resume must be true or false, but is 'out/a'"),
]
INVALID_SAMPLE_OPTIONS = [
    ([], "--ckpt is missing; write --ckpt=PATH: a run folder or checkpoint file"),
    (["--ckpt", "--prompt", "x"], "--ckpt: has no value; it must be a string; write --ckpt=VALUE"),
    (["--ckpt=x", "--min_p=1"], "must be a number of at least 0 and less than 1, but is 1.0"),
    (["--ckpt=x", "--length=9"], "unknown option '--length'; did you mean --max_new_tokens?"),
    (["--ckpt=x", "ROMEO:"], "unexpected argument 'ROMEO:'", '--prompt="TEXT"'),
    (["--ckpt=x", "--novel=x", "--score=y"], "--novel and --score contradict each other"),
    (["--ckpt=x", "--prompt=-", "--interactive"], "--prompt - and --interactive both read"),
]
INVALID_OPTIONS = [
    (
        parse_train,
        [],
        ["config file or run folder, such as configs/shakespeare.yaml, but is given no"],
    ),
    *((parse_train, [SMOKE, *argv], words) for argv, *words in INVALID_TRAIN_OPTIONS),
    *((parse_sample_options, argv, words) for argv, *words in INVALID_SAMPLE_OPTIONS),
]
CONFIGS = ", ".join(f"configs/{path.name}" for path in SHIPPED)
MISSING_CONFIGS = [
    ("configs/shakespear.yaml",
     "no such config or run folder; did you mean configs/shakespeare.yaml?"),
    ("shakespeare", "no such config or run folder; did you mean configs/shakespeare.yaml?"),
    ("zzzz", f"no such config or run folder; allowed: {CONFIGS}"),
    ("configs", f"is a folder without a run; give a config or a run folder: {CONFIGS}"),
]  # fmt: skip


def error_message(*argv, parse=parse_train):
    """Return the one line of the error for these arguments; its exit code is 2."""
    with pytest.raises(ConfigError) as caught:
        parse(list(argv))
    assert caught.value.exit_code == 2
    return printed(caught.value)


def value_of(config, name):
    for key in name.split("."):
        config = getattr(config, key)
    return config


# ------------------------------------------------------------------------------------- config files


@pytest.mark.parametrize("row", INVALID_FILES, ids=lambda row: repr(row[0][:40]))
def test_a_wrong_config_file_is_one_line_with_the_file_and_the_line(row, tmp_path):
    content, *words = row
    file = write(f"{tmp_path}/config.yaml", content)
    message = error_message(file)
    assert message.startswith(f"{file}: ") and len(message) < 1000
    assert all(part in message for part in words), message


@pytest.mark.parametrize(("content", "name", "expected"), VALUES)
def test_a_value_of_a_config_file_is_parsed_by_the_type_of_its_setting(
    content, name, expected, tmp_path
):
    found = value_of(parse_train([write(f"{tmp_path}/config.yaml", content)]).new_settings(), name)
    assert found == expected and type(found) is type(expected)


def test_each_of_the_first_five_wrong_settings_of_a_file_is_a_line(tmp_path, capsys):
    wrong = "sead: 1\nmodel:\n  n_layer: 0\ntrain: 3\nseed: x\ndevice: 1\ncompile: yes\n"
    file = write(f"{tmp_path}/config.yaml", wrong)
    assert exit_code(train_main, [file]) == 2
    lines = capsys.readouterr().err.splitlines()
    numbers = [re.match(rf"error: {file}: line (\d): ", line)[1] for line in lines]
    assert numbers == ["1", "3", "4", "5", "6"]


@pytest.mark.parametrize(("wrong", "said"), MISSING_CONFIGS)
def test_a_missing_config_is_refused_with_the_nearest_name_or_the_configs_there_are(
    wrong, said, monkeypatch
):
    monkeypatch.chdir(ROOT)
    assert error_message(wrong) == f"{wrong}: {said}"


@pytest.mark.parametrize("text", YAML_TEXTS, ids=lambda text: ascii(text[:30]))
def test_whatever_the_yaml_it_has_settings_or_is_refused_in_one_line_and_constructs_nothing(
    text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = write(f"{tmp_path}/config.yaml", text)
    try:
        settings = parse_train([file]).file
    except ConfigError as error:
        assert all(line.startswith(f"{file}: ") and len(line) < 400 for line in error.args)
    else:
        assert {type(value) for value in settings.values()} <= {int, str, bool, tuple}
    assert os.listdir() == ["config.yaml"]


def test_a_config_is_looked_for_here_and_then_beside_the_code(tmp_path, monkeypatch):
    shipped = parse_train([SMOKE]).new_settings()
    monkeypatch.chdir(tmp_path)
    assert parse_train(["configs/smoke.yaml"]).new_settings() == shipped
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/smoke.yaml").write_text("seed: 9\n")
    assert parse_train(["configs/smoke.yaml"]).new_settings().seed == 9


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_print_config_prints_the_settings_as_a_config_file_with_the_same_meaning(
    path, capsys, tmp_path
):
    words = [str(path), "--n_layer=5"]
    with pytest.raises(SystemExit) as ending:
        parse_train([*words, "--print-config"])
    assert ending.value.code == 0
    again = parse_train([write(f"{tmp_path}/config.yaml", capsys.readouterr().out)]).new_settings()
    assert again == parse_train(words).new_settings() and again.model.n_layer == 5


def test_printed_text_is_escaped_and_loads_as_the_same_text(tmp_path):
    special = "\t\n\r\x1b\x85\xa0\u2028\u2029\u202e\ufeff\U0001f3ad#':,-"
    for text in [*special, "null", "None", "1e3", "a: b", " a ", "а\nб"]:
        config = Config(out_dir=text, data=DataConfig(sources=(text, "x")))
        assert escape(to_yaml(config), keep="\n") == to_yaml(config)
        assert (
            parse_train([write(f"{tmp_path}/config.yaml", to_yaml(config))]).new_settings()
            == config
        )
    assert "книга" in to_yaml(Config(out_dir="книга"))


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(("argv", "name", "expected"), TRAIN_OPTIONS)
def test_every_form_of_an_option_sets_its_setting(argv, name, expected):
    for words in ([SMOKE, *argv], [*argv, SMOKE]):
        found = value_of(parse_train(words).new_settings(), name)
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("parse", "argv", "name", "expected"), WORDS)
def test_every_form_of_an_option_that_is_no_setting_has_its_value(parse, argv, name, expected):
    found = getattr(parse(argv), name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("parse", "argv", "words"), INVALID_OPTIONS)
def test_an_invalid_option_is_rejected_in_one_line(parse, argv, words):
    message = error_message(*argv, parse=parse)
    assert all(part in message for part in words), message


def test_settings_without_an_option_are_those_of_the_file_or_the_defaults():
    plain, changed = (parse_train([SMOKE, *more]).new_settings() for more in ([], ["--n_layer=5"]))
    assert (changed.model.n_layer, changed.model.n_embd) == (5, 64)
    assert changed.train == plain.train and plain.seed == Config().seed


def typos(name):
    """Yield `name` with each letter left out, doubled, replaced, or swapped with the next."""
    for i in range(len(name)):
        before, letter, after = name[:i], name[i], name[i + 1 :]
        yield from (before + after, before + 2 * letter + after, before + "x" + after)
        yield before + after[:1] + letter + after[1:]


# pairs that differ by one letter
TWINS = {"top_k": "top_p", "top_p": "top_k", "beta1": "beta2", "beta2": "beta1"}


@pytest.mark.parametrize("sections", [(StartOptions, Config), (SampleConfig,)])
def test_the_error_for_a_mistyped_setting_suggests_the_right_one(sections):
    names = [name.rpartition(".")[2] for section in sections for name in settings_of(section)]
    known = {name: name for name in names}
    for name in names:
        for typo in {typo for typo in typos(name) if typo not in names}:
            expected = {f"did you mean {meant}?" for meant in (name, TWINS.get(name))}
            assert suggest_setting(typo, known, "") in expected, typo


# --------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize(
    ("parse", "sections", "limit"),
    [(parse_train, (StartOptions, Config), 110), (parse_sample_options, (SampleConfig,), 60)],
)
def test_help_has_a_line_or_three_for_each_setting_and_one_usage_line(
    parse, sections, limit, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "40")  # its width does not depend on the terminal
    with pytest.raises(SystemExit, match="0"):
        parse(["--n_layer=x", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: python ") and text.count("usage") == 1
    assert text.isascii() and max(map(len, text.splitlines())) <= 100
    assert text.count("\n") <= limit
    helps = re.findall(r"^  --(\w+) (.*\n(?: {20,}.*\n)*)", text, re.MULTILINE)
    helps = {name: " ".join(lines.split()) for name, lines in helps if lines.count("\n") <= 3}
    for section in sections:
        for field in settings_of(section).values():
            words = field.metadata["choices"] + tuple(map(str, field.metadata["limits"].values()))
            assert all(word in helps[field.name] for word in words), field.name
            assert field.metadata["meaning"] in helps[field.name]


# ---------------------------------------------------------------------------------- start or resume


@pytest.fixture
def folder_with_run(tmp_path, monkeypatch):
    """The working directory, with a run in out/book, a config and an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write("out/book/last.safetensors", "")
    write("my.yaml", "seed: 5\nout_dir: out/book\n")
    os.mkdir("empty")


@pytest.mark.parametrize(
    "words",
    [
        ["out/book"], ["out/book/", "--seed=1"], ["~/out/book"], ["out/book", "--resume"],
        ["--allow_data_change", "out/book"],
    ],
)  # fmt: skip
def test_a_run_folder_is_resumed_and_its_name_stays_as_it_was_typed(words, folder_with_run):
    command = parse_train(words)
    named = next(word for word in words if not word.startswith("-"))
    assert command.resumes and command.resumed_folder == command.out_dir == named
    assert (command.config_file, command.file) == ("", {})
    resumed = command.resumed_settings(Config(seed=9, compile=True, out_dir="elsewhere"))
    assert resumed == Config(seed=command.options.get("seed", 9), compile=True, out_dir=named)


def test_a_config_starts_a_run_and_with_resume_goes_on_with_the_one_in_its_folder(folder_with_run):
    for words, resumes in ([], False), (["--resume"], True), (["--resume", "--minutes=3"], True):
        command = parse_train(["~/my.yaml", *words])
        assert command.resumes == resumes and command.resumed_folder == ""
        assert (command.config_file, command.out_dir) == ("~/my.yaml", "out/book")
    assert parse_train(["my.yaml", "--out_dir=~/a"]).out_dir == "~/a"
    write("bare.yaml", "seed: 5\n")
    assert parse_train(["bare.yaml", "--out_dir=auto"]).out_dir == "out/bare"


REFUSED_STARTS = [  # arguments, words of the message
    (["out/book", "--minutes=1"], "--minutes does not apply to a run folder", "--max_iters"),
    (["out/book", "--init_from=x"], "--init_from does not apply", "give a config file"),
    (["out/book", "--new_characters=add"], "--new_characters does not", "give a config file"),
    (["out/book", "--out_dir=x"], "--out_dir does not apply", "copy the folder to go on elsewhere"),
    (["out/book", "--print_config"], "--print_config does not apply", "config.yaml"),
    (["out/book", "--overwrite"], "--overwrite does not apply", "give a config file"),
    (["my.yaml", "--resume", "--overwrite"], "--resume and --overwrite contradict each other"),
    (["my.yaml", "--allow_data_change"], "only applies together with --resume"),
    (["out/book/last.safetensors"], "name its folder to resume the run: out/book"),
    (["out/book/nosuch.safetensors"], "name its folder to resume the run: out/book"),
    (["out/bok"], "out/bok: no such config or run folder; did you mean out/book?"),
    (["out"], "out: is a folder without a run", "out/book"),
    (["empty"], "empty: is a folder without a run", "configs/shakespeare.yaml"),
    (["my.yaml", "out/book"], "takes one config file or run folder", "['my.yaml', 'out/book']"),
    (["none.yaml", "--resume", "--out_dir=out/book"], "none.yaml: no such config", "my.yaml"),
]


@pytest.mark.parametrize(("argv", "words"), [(argv, words) for argv, *words in REFUSED_STARTS])
def test_what_neither_starts_nor_resumes_a_run_is_refused_with_what_to_do(
    argv, words, folder_with_run
):
    message = error_message(*argv)
    assert all(part in message for part in words), message


def test_settings_that_contradict_are_refused_before_torch_unless_the_run_has_its_own(
    folder_with_run,
):
    wrong = ["my.yaml", "--n_head=5", "--resume"]
    assert parse_train(wrong).resumes
    assert "not divisible by n_head 5" in error_message(*wrong, "--out_dir=out/new")


# ---------------------------------------------------------------------------------------- no torch


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("train.py --help", 0),
        ("train.py configs/smoke.yaml --print-config", 0),
        ("train.py configs/smoke.yaml --n_laier=3", 2),
        ("sample.py --temp=1", 2),
        ("sample.py --ckpt=x --prompt=FILE:x", 3),
        ("sample.py --ckpt=x --html=README.md", 2),
    ],
)
def test_help_settings_and_errors_need_neither_torch_nor_numpy(run, command, code):
    script, *arguments = command.split()
    probe = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        f"try: runpy.run_path('{script}', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert run("-c", probe, script, *arguments, check=code).stdout.endswith("[]\n")
