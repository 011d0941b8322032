"""Settings on the command line and in config files: a mistake is one line, before torch."""

import re
import shutil

import pytest

from common.errors import ConfigError
from common.words import escape_controls
from configs.command import StartOptions, parse_sample_options, parse_train, to_yaml
from configs.fields import settings_of
from configs.schema import LAYOUTS, Config, SampleConfig, flat_settings, suggest_setting
from tests.commands import exit_code, train_main
from tests.conftest import ROOT, printed
from tests.texts import write

SMOKE = str(ROOT / "configs/smoke.yaml")
SHIPPED = sorted(ROOT.glob("configs/*.yaml"))

# the content of a config file, and words of the message
INVALID_FILES = [
    # a config that is empty or not a mapping, or has sections
    ("# only a comment\n", "has no settings; each setting is a line `key: value`"),
    ("- seed\n", "has no settings; each setting is a line `key: value`"),
    (b"# caf\xe9\nseed: 1\n", "not UTF-8 at byte 5"),
    ("seed: 1\nmodel:\n  n_layer: 3\n", "line 2: settings are a flat list", "'model'"),
    # unknown keys
    ("seed: 1\nn_heads: 4\n", "line 2: unknown key 'n_heads'; did you mean n_head (number of"),
    ("hidden_size: 4\n", "did you mean n_embd (width of the model"),  # as in Hugging Face
    ("zzz: 4\n", "unknown key 'zzz'; --help lists all"),
    # wrong types, ranges and choices
    ("n_layer: 6.5\n", "n_layer must be an integer of at least 1, but is '6.5'"),
    ("dropout: 1\n", "must be auto or a number of at least 0 and less than 1, but is '1'"),
    ("layout: flsh\n", f"must be one of {', '.join(LAYOUTS)}, but is 'flsh'"),
    ("encoding: utf8x\n", "encoding: Python has no text encoding 'utf8x'"),
    # what YAML reads as a number elsewhere, and no value
    ("batch_size: 1:30\n", "must be an integer of at least 1, but is '1:30'"),
    ("learning_rate: .nan\n", "but is '.nan'"),
    ("seed: on\n", "but is 'on'"),
    ("seed: 1\nlearning_rate:\n", "line 2: learning_rate must be a number of more than 0"),
    # YAML that is refused
    ("seed: 1\nn_layer: 2\nseed: 2\n", "line 3: duplicate key 'seed', as in line 1"),
    ("seed: 1\n\tn_layer: 4\n", "line 2: ", "not indented, with a space after the colon"),
    ("n_layer:4\nn_head: 4\n", "line 2: ", "with a space after the colon"),
    ("seed: !!python/object/apply:os.mkdir [made]\n", "line 1: seed must be an integer"),
    # settings that do not fit together
    ("answer_after: =\n", "answer_after '=' needs items that end: set separator too"),
    ("n_embd: 384\nn_head: 5\n", "n_embd 384 is not divisible by n_head 5; nearest n_head: 6, 4"),
    ("positions: learned\nn_embd: 100\nn_head: 3\n", "by n_head 3; nearest n_head: 4, 2"),
    ("n_embd: 12\n", "into heads of even size, for positions rope; nearest n_head: 3, 6"),
    ("n_embd: 3\nn_head: 1\n", "choose an even n_embd"),
]  # fmt: skip

VALUES = [  # a value is a string that the type of its setting parses
    ("n_layer: 6.0\n", "n_layer", 6),
    ("learning_rate: 1e-3\n", "learning_rate", 0.001),
    ("max_iters: 3e4\n", "max_iters", 30_000),
    ("seed: 010\n", "seed", 10),  # as Python's int() and YAML 1.2 have it; PyYAML has 8
    ("\ufeffseed: '7'\n", "seed", 7),
    ("sources: [a, b]\n", "sources", ("a", "b")),
    ("seed: &a 7\nmax_iters: *a\n", "max_iters", 7),
    ("compile: True\n", "compile", True),
]
OPTIONS = [  # arguments, setting, value
    (parse_train, [SMOKE, "--n_layer=4", "--n-layer", "3"], "n_layer", 3),  # the last counts
    (parse_train, ["--compile", SMOKE], "compile", True),  # the config is not its value
    (parse_train, ["--compile", "--compile", "false", SMOKE], "compile", False),
    (parse_train, [SMOKE, "--sources=a, b", "--sources=[c"], "sources", ("a, b", "[c")),
    (parse_train, [SMOKE, "--separator='"], "separator", "'"),
    (parse_sample_options, ["--ckpt=x", "--prompt", ""], "prompt", ""),
    (parse_sample_options, ["--ckpt=x", "--prompt=--help me"], "prompt", "--help me"),
    (parse_sample_options, ["--score", "-", "--ckpt=x"], "score", "-"),
    (parse_sample_options, ["--cache", "false", "--ckpt=x"], "cache", False),
    (parse_sample_options, ["--ckpt=x", "--stop=[", "--stop=a\\nb"], "stop", ("[", "a\nb")),
]

INVALID_OPTIONS = [  # arguments, and words of the message
    (parse_train, [], "config file or run folder, such as configs/shakespeare.yaml, but is given"),
    (parse_train, [SMOKE, "--n_heads=4"], "'--n_heads'; did you mean --n_head (number of"),
    (parse_train, [SMOKE, "--lr=1"], "--learning_rate (peak rate of AdamW (alone"),
    (parse_train, [SMOKE, "--epochs=3"], "--max_iters (number of optimization steps)?"),
    (parse_train, [SMOKE, "--n_layer", "-1"], "must be an integer of at least 1, but is '-1'"),
    (parse_train, [SMOKE, "--seed", "--compile"], "--seed: expected one argument; write --key"),
    (parse_train, [SMOKE, "--sources='a/*.md'"], "'a/*.md': the quotes are part of it; use double"),
    (parse_train, [SMOKE, "--separator=;", "--answer_after='='"], "'=': the quotes are part of it"),
    (parse_train, [SMOKE, "--n_head=5"], f"{SMOKE} and the options: n_embd 64 is not divisible"),
    (parse_train, [SMOKE, "--minutes=1", "--max_iters=9"], "contradict each other"),
    (parse_train, [SMOKE, "--new-characters=add"], "only applies together with --init_from"),
    (parse_train, [SMOKE, "--compile", "off"], "an option is --key=value"),
    (parse_sample_options, [], "--ckpt is missing; write --ckpt=PATH"),
    (parse_sample_options, ["--ckpt=x", "--length=9"], "did you mean --max_new_tokens (char"),
    (parse_sample_options, ["--ckpt=x", "ROMEO:"], '--prompt="TEXT"'),
    (parse_sample_options, ["--ckpt=x", "--prompt=-", "--interactive"], "both read standard input"),
]  # fmt: skip


def error_message(*argv, parse=parse_train):
    """Return the one line of the error for these arguments; its exit code is 2."""
    with pytest.raises(ConfigError) as caught:
        parse(list(argv))
    assert caught.value.exit_code == 2
    return printed(caught.value)


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
    settings = parse_train([write(f"{tmp_path}/config.yaml", content)]).new_settings()
    found = flat_settings(settings)[name]
    assert found == expected and type(found) is type(expected)


def test_the_first_five_wrong_settings_of_a_file_are_reported_with_their_lines(tmp_path, capsys):
    wrong = "sead: 1\nn_layer: 2\nn_layer: 0\nbias: 3\nseed: x\ndevice: 1\ncompile: yes\n"
    file = write(f"{tmp_path}/config.yaml", wrong)
    assert exit_code(train_main, [file]) == 2
    lines = capsys.readouterr().err.splitlines()
    numbers = [re.match(rf"error: {file}: line (\d): ", line)[1] for line in lines]
    assert numbers == ["1", "3", "4", "5", "6"]


def test_a_missing_config_is_refused_with_the_nearest_name_or_the_configs_there_are(
    tmp_path, monkeypatch
):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)  # where nobody has trained
    configs = ", ".join(f"configs/{path.name}" for path in SHIPPED)
    assert error_message("shakespear").endswith("did you mean configs/shakespeare.yaml?")
    allowed = f"zzzz: is no config and no run folder; allowed: {configs}"
    assert error_message("zzzz") == allowed
    assert error_message("configs") == allowed.replace("zzzz", "configs")


def test_a_config_is_looked_for_here_and_then_beside_the_code(tmp_path, monkeypatch):
    shipped = parse_train([SMOKE]).new_settings()
    monkeypatch.chdir(tmp_path)
    assert parse_train(["configs/smoke.yaml"]).new_settings() == shipped
    assert error_message("configs/smoke").endswith(f"did you mean {SMOKE}?")
    write("configs/smoke.yaml", "seed: 9\n")
    assert parse_train(["configs/smoke.yaml"]).new_settings().seed == 9


def test_a_run_beside_the_code_is_named_to_whoever_works_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("common.files.ROOT", tmp_path / "code")
    run = tmp_path / "code/out/book"
    write(f"{run}/last.safetensors", "")
    monkeypatch.chdir(tmp_path)
    assert error_message("out/book").endswith(f"did you mean {run}?")


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


def test_a_name_with_special_characters_is_printed_escaped_and_loads_as_the_same_name(tmp_path):
    special = "\t\n\r\x1b\x85\xa0\u2028\u202e\ufeff\U0001f3ad#':,-"
    for text in [*special, "null", "1e3", "a: b", " a ", "а\nб"]:
        shown = to_yaml(Config(out_dir=text))
        assert escape_controls(shown, keep="\n") == shown
        found = parse_train([write(f"{tmp_path}/config.yaml", shown)]).new_settings()
        assert found == Config(out_dir=text)


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(("parse", "argv", "name", "expected"), OPTIONS)
def test_every_form_of_an_option_sets_its_setting(parse, argv, name, expected):
    parsed = parse(argv)
    settings = flat_settings(parsed.new_settings()) if parse is parse_train else vars(parsed)
    found = settings[name]
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("parse", "argv", "words"), INVALID_OPTIONS)
def test_an_invalid_option_or_a_value_in_single_quotes_is_refused_in_one_line(parse, argv, words):
    assert words in error_message(*argv, parse=parse)


def test_the_error_for_a_mistyped_setting_suggests_the_right_one():
    settings = settings_of(Config)
    for name in settings.keys() - {"beta1", "beta2"}:  # these differ by one letter
        for i in range(len(name)):
            typo = name[:i] + name[i + 1 :]
            assert suggest_setting(typo, settings).startswith(f"did you mean {name} (")


def test_the_words_of_our_own_documents_are_recognized_as_settings():
    meant = {
        "context": "block_size", "width": "n_embd", "depth": "n_layer", "layers": "n_layer",
        "heads": "n_head", "steps": "max_iters", "batch": "batch_size", "attention": "layout",
    }  # fmt: skip
    for word, name in meant.items():
        assert f"; did you mean --{name} (" in error_message(SMOKE, f"--{word}=1")


# --------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize(
    ("parse", "sections", "limit"),
    [(parse_train, (StartOptions, Config), 110), (parse_sample_options, (SampleConfig,), 60)],
)
def test_help_has_the_meaning_of_each_setting_and_fits_a_terminal(
    parse, sections, limit, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "40")  # its width does not depend on the terminal
    with pytest.raises(SystemExit, match="0"):
        parse(["--n_layer=x", "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 and text.count("\n") <= limit
    words = " ".join(text.split())
    for field in (field for section in sections for field in settings_of(section).values()):
        meaning = re.escape(field.metadata["meaning"])
        assert re.search(rf"--{field.name} (VALUE )?{meaning}", words), field.name


# ---------------------------------------------------------------------------------- start or resume


@pytest.fixture
def folder_with_run(tmp_path, monkeypatch):
    """The working directory, with a run in out/book and a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write("out/book/last.safetensors", "")
    write("my.yaml", "seed: 5\nout_dir: out/book\n")


@pytest.mark.parametrize("words", [["out/book/", "--seed=1"], ["~/out/book", "--resume"]])
def test_a_run_folder_is_resumed_and_its_name_stays_as_it_was_typed(words, folder_with_run):
    command = parse_train(words)
    named = words[0]
    assert command.resumes and command.resumed_folder == command.out_dir == named
    assert (command.config_file, command.settings_in_file) == ("", {})
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


REFUSED_STARTS = [  # arguments, and words of the message
    (["out/book", "--minutes=1"], "--minutes does not apply to a run folder", "--max_iters"),
    (["out/book", "--out_dir=x"], "--out_dir does not apply", "a run keeps its place"),
    (["my.yaml", "--resume", "--overwrite"], "--resume and --overwrite contradict each other"),
    (["out/book/last.safetensors"], "name its folder to resume the run: out/book"),
    (["out/bok"], "out/bok: is no config and no run folder; did you mean out/book?"),
    (["bok"], "bok: is no config and no run folder; did you mean out/book?"),
    (["my.yaml", "out/book"], "takes one config file or run folder", "['my.yaml', 'out/book']"),
]


@pytest.mark.parametrize("row", REFUSED_STARTS, ids=lambda row: " ".join(row[0]))
def test_what_neither_starts_nor_resumes_a_run_is_refused_with_what_to_do(row, folder_with_run):
    argv, *words = row
    message = error_message(*argv)
    assert all(part in message for part in words), message


# ---------------------------------------------------------------------------------------- no torch


def test_help_settings_and_errors_need_neither_torch_nor_numpy(run):
    commands = {
        "train.py --help": 0,
        "train.py configs/smoke.yaml --print-config": 0,
        "train.py configs/smoke.yaml --n_laier=3": 2,
        "sample.py --temp=1": 2,
        "sample.py --ckpt=x --prompt=FILE:x": 3,
        "sample.py --ckpt=x --html=README.md": 2,
    }
    probe = """
import runpy, sys
codes = []
for command in sys.argv[1:]:
    sys.argv = command.split()
    try: runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving: codes.append(leaving.code)
    except ValueError as error: codes.append(error.exit_code)
print(codes, sorted({"torch", "numpy"} & set(sys.modules)))
"""
    assert run("-c", probe, *commands).stdout.endswith(f"{[*commands.values()]} []\n")
