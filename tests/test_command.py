"""Settings in files and options: a mistake is one line with what is allowed, before torch."""

import re

import pytest

from common.console import UserError
from configs.command import TRAIN_SECTIONS, parse_sample_options, parse_train
from configs.fields import describe_allowed, fields_of
from configs.schema import SampleConfig, to_flat
from storage.checks import check_paths, locked
from tests.conftest import ROOT, run_command
from tests.runs import exit_code, train_main
from tests.texts import write

RECIPES = sorted(ROOT.glob("configs/*.yaml"))
WRONG_FILES = {  # content: words of the message
    "- seed": "has no settings; each setting is a line `key: value`",
    "# caf\xe9": "not YAML in UTF-8: unacceptable character #x00e9",
    "seed: 1\nn_heads: 4": "line 2: unknown setting 'n_heads'; did you mean n_head (number of",
    "n_layer: 6.5": "n_layer must be an integer of at least 1, but is '6.5'",
    "dropout: 1": "must be auto or a number of at least 0 and less than 1, but is '1'",
    "layout: flsh": "one of heads, separate, fused, interleaved, stacked, flattened, but is",
    "encoding: utf8x": "encoding: unknown encoding: utf8x; use for example utf-8",
    "batch_size: 1:30": "but is '1:30'",
    "learning_rate: inf": "but is 'inf'",
    "compile: on": "compile must be true or false, but is 'on'",
    "val_sources: {a.txt}": "val_sources must be",
    "seed: 1\nlearning_rate:": "line 2: learning_rate must be a number of more than 0",
    "sources: https://a.net/b/c.txt": "FILE#sha256=<64 hex digits>, or several, but is 'https://a",
    'seed: 1\nsources: "D:\\notes"': "line 2: sources: 'D:\\notes': backslashes need single quotes",
    'out_dir: "D:\\Plays"': "out_dir: 'D:\\u2029lays': backslashes need single quotes",
    'sources: "C:\\Users"': "but found 's'); backslashes need single quotes",
    "seed: 1\nn_layer: 2\nseed: 2": "line 3: duplicate key 'seed', as in line 1",
    "n_layer:4\nn_head: 4": "line 2: not YAML",
    "seed: !!python/object/apply:os.mkdir [made]": "line 1: seed must be an integer",
    "sources: &a [[*a], *a]": "sources must be a path,",
    "answer_after: =": "answer_after '=' needs items that end: set separator too",
    "n_embd: 130": "of 8 (2 * n_head, for rope): n_embd 128 or n_embd 136 or n_head 5",
    "positions: learned\nn_embd: 100\nn_head: 3": "3 (n_head): n_embd 99 or n_embd 102 or n_head 2",
}
WRONG_OPTIONS = {  # of train.py: words of the message
    "": "config file or run folder, such as configs/shakespeare.yaml, but is given none",
    "my.yaml --lr=1": "'--lr'; did you mean --learning_rate (peak rate of AdamW",
    "my.yaml --out_dir --max_iters=5": "--out_dir: its value is missing",
    "my.yaml --seed": "--seed: its value is missing",
    "my.yaml --out_dir=gs://a/run": "out_dir must be a path on this machine, but is 'gs://a",
    "my.yaml --out_dir=book.txt/run": "out_dir: book.txt/run: Not a directory; choose another",
    "my.yaml --sources='a/*.md'": "'a/*.md': the quotes are part of it; use double",
    "my.yaml --sources=caf\udce9.txt": r"sources must be in UTF-8, but is 'caf\udce9.txt'",
    "my.yaml --n_head=5": "my.yaml and the options: n_embd 128 must be a multiple",
    "my.yaml --minutes=1 --max_iters=9": "contradict each other",
    "my.yaml --sources a.txt b.txt": "several texts are --sources=A --sources=B; a pattern needs",
    "my.yaml --overwrite --sources=book.txt,b.txt": "several texts need the option once for each",
    "my.yaml --overwrite --val_sources=zzz.txt": "zzz.txt (--val_sources=zzz.txt): no such file",
    "book.txt": "is no .yaml file; a run is named by its folder, a text by configs/mytext.yaml",
    "out/book --minutes=1": "--minutes does not apply to a run folder",
    "out/gone": "has a log, but its checkpoints are gone; --overwrite starts anew",
    "my.yaml --out_dir=out/gone --resume": "are gone; --overwrite starts anew, another --out_dir",
    "out/bok": "out/bok: is no config and no run folder; did you mean out/book?",
    "zzz": f"allowed: {', '.join(map(str, RECIPES))}",
}
WRONG_SAMPLES = {  # of sample.py: words of the message
    "": "--ckpt is missing; write --ckpt=PATH",
    "--ckpt=x --lr=1": "unknown setting '--lr'; --help lists all",  # not of a setting of train.py
    "--ckpt=x ROMEO:": '--prompt="TEXT"',
    "--ckpt=x --temperature=-1": "temperature must be auto or a number of at least 0",
}
VALUES = {  # a line of a file, or an option: the value in the type of its setting
    "n_layer: 6.0": 6, "learning_rate: 1e-3": 0.001, "seed: 010": 10, "\ufeffseed: '7'": 7,
    "\xa0seed: 7": 7, "# seed: 7": 1337, "sources: [a, b]": ("a", "b"), "compile: True": True,
    "fallback:": "", "val_sources: ~": (), "sources: '~'": ("~",),  # in quotes, the home folder
    "--n_layer=3": 3, "--n_layer=4 --n-layer 3": 3, "--compile": True, "--compile=false": False,
    "--sources=a,b --sources=[c": ("a,b", "[c"), "--eval_interval=auto --minutes=1": "auto",
}  # fmt: skip
STARTS = {  # a command: what it does, and the run folder as it was typed
    "~/my.yaml": ("new", "out/book"),
    "my.yaml --out_dir=auto": ("new", "out/my"),
    "my.yaml --out_dir=~/a --resume": ("new", "~/a"),
    "my.yaml --init_from=out/book": ("fine-tuned", "out/book"),
    "my.yaml --resume --init_from=out/book --minutes=3": ("resumed", "out/book"),
    "~/out/book --layout=heads": ("resumed", "~/out/book"),
}


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


@pytest.mark.parametrize("content", WRONG_FILES, ids=ascii)
def test_wrong_file(content):
    write("wrong.yaml", content.encode("latin-1"))
    message = error_message(parse_train, ["wrong.yaml"])
    assert message.startswith("wrong.yaml: ") and WRONG_FILES[content] in message


@pytest.mark.parametrize("words", WRONG_OPTIONS, ids=ascii)
def test_wrong_option(words):
    assert WRONG_OPTIONS[words] in error_message(
        lambda argv: check_paths(parse_train(argv)), words.split()
    )


@pytest.mark.parametrize("words", WRONG_SAMPLES)
def test_wrong_option_of_sample(words):
    assert WRONG_SAMPLES[words] in error_message(parse_sample_options, words.split())


@pytest.mark.parametrize("words", VALUES, ids=ascii)
def test_value(words):
    options = words.split() if words.startswith("--") else []
    file = "my.yaml" if options else write("value.yaml", words)
    found = to_flat(parse_train([file, *options]).config)
    value = found[re.search(r"[a-z][\w-]+", words)[0].replace("-", "_")]
    assert value == VALUES[words] and type(value) is type(VALUES[words])


def test_sources_have_no_fallback():
    """The fallback of a recipe is for its own text alone."""
    words = ["configs/shakespeare.yaml", "--sources=mine.txt"]
    assert parse_train(words).config.data.fallback == ""


def test_value_of_sample():
    words = ["--ckpt=x", "--prompt=--help me", "--cache=false", "--stop=[", "--stop=a\\nb"]
    found = parse_sample_options(words)
    assert (found.prompt, found.cache, found.stop) == ("--help me", False, ("[", "a\nb"))


def test_first_five_faults_of_a_file(capsys):
    write("wrong.yaml", "sead: 1\nn_layer: 2\nn_layer: 0\nbias: 3\nseed: x\ndevice: 1\ncompile: 2")
    assert exit_code(train_main, ["wrong.yaml"]) == 2
    lines = re.findall(r"^error: wrong.yaml: line (\d): ", capsys.readouterr().err, re.M)
    assert lines == ["1", "3", "4", "5", "6"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_print_config_is_a_config(path, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_train([str(path), "--n_layer=5", "--print-config"])
    again = parse_train([write("again.yaml", capsys.readouterr().out)]).config
    assert again == parse_train([str(path), "--n_layer=5"]).config


def test_help_has_every_setting(capsys):
    """And its range."""
    for parse, sections in ((parse_train, TRAIN_SECTIONS), (parse_sample_options, [SampleConfig])):
        with pytest.raises(SystemExit, match="0"):
            parse(["--n_layer=x", "--help"])
        text = " ".join(capsys.readouterr().out.split())
        for name, field in fields_of(*sections).items():
            limits = f"; {describe_allowed(field)}" if field.metadata["limits"] else ""
            assert f"--{name} {field.metadata['meaning']}{limits}" in text


# ---------------------------------------------------------------------------------- start or resume


def test_config_here_or_beside_the_code():
    assert parse_train(["configs/smoke.yaml"]).config.train.max_iters != 9
    write("configs/smoke.yaml", "max_iters: 9\n")
    assert parse_train(["configs/smoke.yaml"]).config.train.max_iters == 9


@pytest.mark.parametrize("words", STARTS)
def test_start(words):
    command = parse_train(words.split())
    assert (command.mode, command.out_dir) == STARTS[words]


def test_mistakes_need_no_torch(tmp_path):
    """Nor what the disk shows: a path that is missing, an out_dir that cannot be made or locked."""
    probe = """
import runpy, sys
for command in sys.argv[1:]:
    sys.argv = command.split()
    try: runpy.run_path(sys.argv[0], run_name="__main__")
    except (SystemExit, ValueError): pass
print({"torch", "numpy"} & set(sys.modules))
"""
    train = f"train.py configs/smoke.yaml --out_dir={tmp_path}/new"
    commands = [
        "train.py --help", "sample.py --temp=1", f"sample.py --ckpt={tmp_path}/new",
        f"{train} --n_laier=3", f"{train} --init_from=zz", f"{train} --val_sources=zz.txt",
        f"{train} --out_dir={tmp_path}/taken",
    ]  # fmt: skip
    with locked(tmp_path / "taken"):
        shown = run_command("-c", probe, *commands).stdout
    assert shown.endswith("set()\n") and not (tmp_path / "new").exists()
