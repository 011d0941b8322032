"""Settings in files and options: a mistake is one line with what is allowed, before torch."""

import itertools
import os
import random
import re

import pytest

from common.console import ConfigError, UserError
from configs.command import (
    TRAIN_SECTIONS,
    parse_sample_options,
    parse_train,
    read_config,
)
from configs.fields import fields_of
from configs.schema import (
    FIELDS,
    Config,
    ModelConfig,
    SampleConfig,
    settings_by_name,
)
from storage.checks import check_paths, locked
from tests.conftest import ROOT, run_command
from tests.runs import exit_code, train_main
from tests.texts import write

SMOKE = str(ROOT / "configs/smoke.yaml")
RECIPES = sorted(ROOT.glob("configs/*.yaml"))
FORM = "each setting is a line `key: value`, not indented, with a space after the colon"
# each list has the one before it nine times: written out, they would fill the memory
BOMB = "".join(
    f"{key}: &{key} [{', '.join(['*' + old] * 9)}]\n"
    for old, key in itertools.pairwise("abcdefghijkl")
).replace("*a", "x")

WRONG_FILES = {  # content: words of the message
    "- seed": f"has no settings; {FORM}",
    "# caf\xe9": "not YAML in UTF-8: unacceptable character #x00e9",
    "seed: 1\nmodel:\n  n_layer: 3": "line 2: unknown setting 'model'; --help lists all",
    "seed: 1\nn_heads: 4": "line 2: unknown setting 'n_heads'; did you mean n_head (number of",
    "hidden_size: 4": "did you mean n_embd (width of the model",  # as in Hugging Face
    "zzz: 4": "unknown setting 'zzz'; --help lists all",
    "n_layer: 6.5": "n_layer must be an integer of at least 1, but is '6.5'",
    "dropout: 1": "must be auto or a number of at least 0 and less than 1, but is '1'",
    "layout: flsh": "must be one of heads, separate, fused, interleaved, stacked, unrolled, but is",
    "encoding: utf8x": "encoding: unknown encoding: utf8x; use for example utf-8",
    "encoding: rot13": "'rot13' is not a text encoding; ",
    "encoding: undefined": "undefined encoding",
    "batch_size: 1:30": "but is '1:30'",
    "learning_rate: .nan": "but is '.nan'",
    "learning_rate: inf": "but is 'inf'",
    "seed: on": "but is 'on'",
    "val_sources: {a.txt}": "val_sources must be",
    "seed: 1\nlearning_rate:": "line 2: learning_rate must be a number of more than 0",
    "sources: ~": "sources must be a path, a pattern or https://HOST/FOLDER/FILE#sha256=<64 hex",
    "sources: [a, null]": "or several, but is ('a', None)",
    "sources: https://a.net/b/c.txt": "several, but is 'https://a.net/b/c.txt'",
    "fallback: https://a.net/b/c.txt#sha256=123": "hex digits>, but is 'https://a.net",
    'seed: 1\nsources: "D:\\notes"': "line 2: sources: 'D:\\notes': backslashes need single quotes",
    'out_dir: "D:\\Plays"': "out_dir: 'D:\\u2029lays': backslashes need single quotes",
    'sources: [a, "b\\new.txt"]': "sources: 'b\\new.txt': backslashes need single quotes",
    'seed: 1\nsources: "C:\\Users"': "but found 's'); backslashes need single quotes",
    f"{BOMB}sources: *l": "line 5: unknown setting 'f'",
    "sources: &a [[*a], *a]": "sources must be a path,",
    "seed: 1\nn_layer: 2\nseed: 2": "line 3: duplicate key 'seed', as in line 1",
    "seed: 1\n\tn_layer: 4": "line 2: not YAML",
    "n_layer:4\nn_head: 4": "line 2: not YAML",
    "seed: !!python/object/apply:os.mkdir [made]": "line 1: seed must be an integer",
    "answer_after: =": "answer_after '=' needs items that end: set separator too",
    "n_embd: 130": "of 8 (2 * n_head, for rope): n_embd 128 or n_embd 136 or n_head 5",
    "positions: learned\nn_embd: 100\nn_head: 3": "3 (n_head): n_embd 99 or n_embd 102 or n_head 2",
    "n_embd: 3": "multiple of 8 (2 * n_head, for rope): n_embd 8",
    "n_embd: 1000000001": ": n_embd 1000000000 or n_embd 1000000008",
}
WRONG_OPTIONS = {  # of train.py: words of the message
    "": "config file or run folder, such as configs/shakespeare.yaml, but is given",
    "my.yaml --n_heads=4": "'--n_heads'; did you mean --n_head (number of",
    "my.yaml --lr=1": "--learning_rate (peak rate of AdamW (without",
    "my.yaml --epochs=3": "--max_iters (number of optimization steps)?",
    "my.yaml --n_layer -1": "--n_layer: its value is missing",
    "my.yaml --out_dir --max_iters=5": "--out_dir: its value is missing",
    "my.yaml --seed": "--seed: its value is missing",
    "my.yaml --out_dir=gs://a/run": "out_dir must be a path on this machine, but is 'gs://a",
    "my.yaml --init_from=s3://a/run": "init_from must be a path on this machine",
    "my.yaml --sources='a/*.md'": "'a/*.md': the quotes are part of it; use double",
    "my.yaml --n_head=5": "my.yaml and the options: n_embd 128 must be a multiple",
    "my.yaml --minutes=1 --max_iters=9": "contradict each other",
    "my.yaml --resume --overwrite": "contradict each other",
    "my.yaml --compile true": "an option is --key=value, such as --compile=true",
    "my.yaml --sources a.txt b.txt": "several texts are --sources=A --sources=B; a pattern needs",
    "my.yaml --overwrite --sources=book.txt,b.txt": "several texts need the option once for each",
    "book.txt": "is no .yaml file; a run is named by its folder, a text by configs/mytext.yaml",
    "my.yaml out/book": "takes one config file or run folder",
    "out/book --minutes=1": "--minutes does not apply to a run folder",
    "out/book --out_dir=x": "a run keeps its place",
    "out/book/last.safetensors": "a run is named by its folder",
    "out/gone": "has a log, but its checkpoints are gone; --overwrite starts anew",
    "my.yaml --out_dir=out/gone": "are gone; --overwrite starts anew, another --out_dir leaves",
    "my.yaml --out_dir=out/gone --resume": "has a log, but its checkpoints are gone",
    "my.yaml": "already holds a run; --resume continues it, --overwrite replaces it, another",
    "out/bok": "out/bok: is no config and no run folder; did you mean out/book?",
    "configs/smoke": f"did you mean {SMOKE}?",
    "zzz": f"allowed: {', '.join(map(str, RECIPES))}",
}
WRONG_SAMPLES = {  # of sample.py: words of the message
    "": "--ckpt is missing; write --ckpt=PATH",
    "--ckpt=x --new_tokens=9": "did you mean --max_new_tokens (char",
    "--ckpt=x --lr=1": "unknown setting '--lr'; --help lists all",  # not of a setting of train.py
    "--ckpt=x ROMEO:": '--prompt="TEXT"',
    "--ckpt=x --temperature=-1": "temperature must be auto or a number of at least 0",
    "--ckpt=x --prompt --num_samples=3": "--prompt: its value is missing",
    "--ckpt=x --prompt='ROMEO:'": "prompt: 'ROMEO:': the quotes are part of it; use double quotes",
    "--ckpt=gs://a/run": "ckpt must be a path on this machine",
    "--ckpt=x --html=s3://a/page.html": "html must be a path on this machine",
    "--ckpt=x --interactive --html a": "--interactive and --html contradict each other",
    "--ckpt=x --score b --novel c": "--score and --novel contradict each other",
    "--ckpt=x --sample 9 --num_samples 3": "--sample and --num_samples contradict each other",
}
VALUES = {  # a line of a file, or an option: the value in the type of its setting
    "n_layer: 6.0": 6, "learning_rate: 1e-3": 0.001, "max_iters: 3e4": 30_000, "seed: 010": 10,
    "\ufeffseed: '7'": 7, "sources: [a, b]": ("a", "b"), "compile: True": True,
    "sources: '~'": ("~",),  # only in quotes is it the home folder
    "fallback:": "", "val_sources: ~": (), "\xa0seed: 7": 7,
    "--n_layer=3": 3, "--n_layer=4 --n-layer 3": 3, "--compile": True, "--compile=false": False,
    "--sources=a,b --sources=[c": ("a,b", "[c"), "--separator='": "'",
    "--eval_interval=auto --minutes=1": "auto",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a run in out/book and a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write("out/book/last.safetensors", "")
    write("out/gone/metrics.csv", "")
    write("my.yaml", "seed: 5\nout_dir: out/book\n")
    write("book.txt", "A text.")


def error_message(function, argument):
    with pytest.raises(UserError) as caught:
        function(argument)
    return str(caught.value)


@pytest.mark.parametrize("content", WRONG_FILES, ids=lambda content: ascii(content[-40:]))
def test_wrong_file(content):
    write("wrong.yaml", content.encode("latin-1"))
    message = error_message(parse_train, ["wrong.yaml"])
    assert message.startswith("wrong.yaml: ") and len(message) < 2000
    assert WRONG_FILES[content] in message


@pytest.mark.parametrize("words", WRONG_OPTIONS)
def test_wrong_option(words):
    assert WRONG_OPTIONS[words] in error_message(
        lambda argv: check_paths(parse_train(argv)), words.split()
    )


@pytest.mark.parametrize("words", WRONG_SAMPLES)
def test_wrong_option_of_sample(words):
    assert WRONG_SAMPLES[words] in error_message(parse_sample_options, words.split())


def test_name_that_is_not_utf_8():
    message = error_message(parse_train, ["my.yaml", "--sources", os.fsdecode(b"caf\xe9.txt")])
    assert message.startswith("sources must be ") and message.endswith(r"is 'caf\udce9.txt'")


@pytest.mark.parametrize("words", VALUES)
def test_value(words):
    options = words.split() if words.startswith("--") else []
    file = "my.yaml" if options else write("value.yaml", words)
    found = settings_by_name(parse_train([file, *options]).config)
    value = found[re.search(r"[a-z][\w-]+", words)[0].replace("-", "_")]
    assert value == VALUES[words] and type(value) is type(VALUES[words])


def test_value_of_sample():
    words = ["--ckpt=x", "--prompt=--help me", "--cache=false", "--stop=[", "--stop=a\\nb"]
    found = parse_sample_options(words)
    assert (found.prompt, found.cache, found.stop) == ("--help me", False, ("[", "a\nb"))


def test_first_five_faults_of_a_file(capsys):
    wrong = "sead: 1\nn_layer: 2\nn_layer: 0\nbias: 3\nseed: x\ndevice: 1\ncompile: yes"
    write("wrong.yaml", wrong)
    assert exit_code(train_main, ["wrong.yaml"]) == 2
    lines = re.findall(r"^error: wrong.yaml: line (\d): ", capsys.readouterr().err, re.M)
    assert lines == ["1", "3", "4", "5", "6"]


def test_random_yaml_is_settings_or_faults(monkeypatch):
    """No traceback, whatever the text."""
    monkeypatch.setattr("configs.command._read_config_file", lambda text: text)
    words = [*FIELDS, *"{}[],:-?&*!|>%@`'\"#\n\t\\~\x85é", "\n", ": ", "- ", "? "]
    words += ["&a ", "*a", "<<", "---\n", "...\n", "!!set ", "\n  ", "1e3", "true", '"\\x']
    draw = random.Random(0)
    for _ in range(1000):
        text = "n_layer: 2\n" * draw.randint(0, 1) + "".join(draw.choices(words, k=12))
        try:
            assert read_config(text).keys() <= FIELDS.keys()
        except ConfigError as error:
            assert 1 <= len(error.args) <= 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_print_config_is_a_config(path, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_train([str(path), "--n_layer=5", "--print-config"])
    again = parse_train([write("again.yaml", capsys.readouterr().out)]).config
    assert again == parse_train([str(path), "--n_layer=5"]).config


@pytest.mark.parametrize(
    ("parse", "sections"),
    [(parse_train, TRAIN_SECTIONS), (parse_sample_options, (SampleConfig,))],
)
def test_help_has_every_setting(parse, sections, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--n_layer=x", "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for field in (field for section in sections for field in fields_of(section).values()):
        meaning = re.escape(field.metadata["meaning"])
        assert re.search(rf"--{field.name} {meaning}", " ".join(text.split())), field.name


# ---------------------------------------------------------------------------------- start or resume


def test_config_here_or_beside_the_code():
    assert parse_train(["configs/smoke.yaml"]).config == parse_train([SMOKE]).config
    write("configs/smoke.yaml", "seed: 9\n")
    assert parse_train(["configs/smoke.yaml"]).config.seed == 9


@pytest.mark.parametrize("words", [["out/book/", "--layout=heads"], ["~/out/book", "--resume"]])
def test_run_folder_is_resumed(words):
    """With its own settings and the options; its name stays as it was typed."""
    command = parse_train(words)
    assert (command.mode, command.out_dir, command.settings_in_file) == ("resumed", words[0], {})
    resumed = command.build_settings(Config(seed=9, compile=True, out_dir="elsewhere"))
    model = ModelConfig(**command.overrides)
    assert resumed == Config(seed=9, compile=True, out_dir=words[0], model=model)


def test_config_starts_a_run_or_resumes_it():
    for words, mode in [
        ([], "new"),
        (["--init_from=out/book"], "fine-tuned"),
        (["--resume"], "resumed"),
        (["--resume", "--init_from=out/book", "--minutes=3"], "resumed"),
    ]:
        command = parse_train(["~/my.yaml", *words])
        assert (command.mode, command.out_dir) == (mode, "out/book")
    assert parse_train(["my.yaml", "--out_dir=~/a"]).out_dir == "~/a"
    assert parse_train(["my.yaml", "--out_dir=auto"]).out_dir == "out/my"


def test_mistakes_need_no_torch(tmp_path):
    """Nor what the disk shows: a path that is missing, an out_dir that cannot be made or locked."""
    probe = """
import runpy, sys
for command in sys.argv[1:]:
    sys.argv = command.split()
    try: runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving: print(leaving.code)
    except ValueError: print(2)
print({"torch", "numpy"} & set(sys.modules))
"""
    train = f"train.py {SMOKE} --out_dir="
    commands = [
        "train.py --help", "sample.py --temp=1", f"sample.py --ckpt={tmp_path}/new",
        f"{train}{tmp_path}/new --init_from=zz", f"{train}{tmp_path}/new --n_laier=3",
        f"{train}{tmp_path}/new --sources=zz.txt", f"{train}{tmp_path}/new --val_sources=zz.txt",
        f"{train}{SMOKE}/new", f"{train}{tmp_path}/taken",
    ]  # fmt: skip
    with locked(tmp_path / "taken"):
        codes = run_command("-c", probe, *commands).stdout.split()[-10:]
    assert codes == ["0", *"22222222", "set()"] and not (tmp_path / "new").exists()
