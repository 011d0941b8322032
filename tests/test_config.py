"""Config files: the values of valid ones, and one-line errors for all others."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from common import files
from common.console import escape
from common.errors import ConfigError
from configs.command import parse_train
from configs.fields import settings_of
from configs.schema import (
    LAYOUTS,
    Config,
    DataConfig,
    estimate_parameters,
    flat_settings,
    from_dict,
    to_dict,
)
from configs.strict_yaml import to_yaml
from data.summary import PRESETS, size_advice
from tests.commands import exit_code, train_main
from tests.conftest import ROOT, printed

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
INVALID = {  # by row of faults.md: contents of files, and words of the message
    "A4": [
        ("", "config is empty"),
        ("# only\n# comments\n", "config is empty"),
    ],
    "A5": [
        ("model: 6\n", "line 1", "model must be a mapping"),
        ("? [a]\n: 1\n", "a key must be a word"),
    ],
    "A6": [
        ("seed:1\n", "must be a mapping", "missing space after ':' in 'seed:'"),
        ("model:\n  n_layer:4\n  n_head: 4\n", "line 3", "missing space after ':' in 'n_layer:'"),
        ("seed: 1\ncompile\nout_dir: x\n", "line 2: missing ':' after the key; write key: value"),
    ],
    "A7": [
        ("seed: 1\n\nmodel:\n  n_heads: 4\n", "unknown key 'n_heads'", "line 4", "model.n_head?"),
        ("train:\n  n_head: 4\n", "unknown key 'n_head'", "line 2", "did you mean model.n_head?"),
        ("zzz: 4\n", "unknown key 'zzz'", "line 1", "python train.py --help lists all"),
    ],
    "A8": [("model: {attention: flsh}\n", "line 1", f"one of {', '.join(LAYOUTS)}", "'flsh'")],
    "A9": [
        ('model:\n  n_layer: "6"\n', "line 2", "must be an integer in [1, 512]", "is a string",
         "remove the quotes"),
    ],
    "A10": [("model: {n_layer: 6.5}\n", "must be an integer", "6.5")],
    "A13": [("seed: 010\n", "'010' has a leading zero")],
    "A14": [("train: {batch_size: 1:30}\n", "must be an integer", "'1:30' is a time of day")],
    "A15": [
        ("model: {dropout: on}\n", "must be auto or a number in [0, 1)", "'on'"),
        ("compile: yes\n", "must be true or false", "'yes'"),
    ],
    "A16": [
        ("train:\n  learning_rate:\n", "line 2", "learning_rate has no value"),
        ("train: {learning_rate: None}\n", "'None' is not a value"),
        ("out_dir: ''\n", "out_dir must be a string", "''"),
    ],
    "A17": [
        ("train: {learning_rate: .nan}\n", "'.nan' is not finite"),
        ("train: {grad_clip: 1.0e+400}\n", "inf, which is not finite"),
    ],
    "A18": [
        ("model: {n_layer: 0}\n", "must be an integer in [1, 512], but is 0"),
        ("train: {learning_rate: 0}\n", "must be a number in (0, 10], but is 0.0"),
    ],
    "A19": [
        ("model: {n_embd: 384, n_head: 5}\n",
         "n_embd 384 is not divisible by n_head 5; nearest n_head: 6, 4"),
    ],
    "A20": [
        ("model:\n  n_layer: 4\n  n_head: 4\n  n_layer: 6\n",
         "duplicate key 'n_layer' (lines 2 and 4)"),
    ],
    "A21": [("model:\n\tn_layer: 4\n", "tab at line 2")],
    "A22": [("seed: 1\n---\nseed: 2\n", "line 2", "a second document")],
    "A23": [
        (b"# caf\xe9\nseed: 1\n", "invalid utf-8 at byte 5"),
        (b"\xff\xfes\x00e", "invalid utf-16", "at byte 4"),
    ],
    "A25": [
        ("seed: 1\nout_dir: a\0b\n", "line 2", "control character '\\x00'"),
        ("seed: 1 # \x1b[2J\n", "line 1", "control character '\\x1b'"),
        ('out_dir: "a\\0b"\n', "out_dir must be a string", "'a\\x00b'"),
    ],
    "A26": [('"\\e[2J": 1\n', "unknown key '\\x1b[2J'")],
    "A27": [
        ("seed: !!python/object/apply:os.system [ls]\n", "line 1", "tags such as",
         "not supported"),
    ],
    "A28": [("seed: 2024-13-45\n", "must be an integer", "'2024-13-45' is not a plain number")],
    "A29": [("- " * 2000, "line 1", "nested too deep")],
    "A30": [
        ("a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "aliases are not supported"),
    ],
    "A31": [
        ("seed: " + "9" * 5000 + "\n", "has more than 40 characters"),
        ("seed: ６\n", "'６' is not a plain number"),
        ("%YAML " + "9" * 5000 + ".1\n---\nseed: 1\n", "not YAML (ValueError)",
         "write lines of key: value"),
    ],
    "A32": [
        ("seed: [" + "1," * 9_990 + "1]\n", "is a list"),
        ("seed: [" + "1," * 9_999 + "1]\n", "too long for a config; at most 10,000 keys, values"),
    ],
    "A33": [
        ("train: {warmup_iters: 3000}\n", "warmup_iters 3000 is more than max_iters 2000"),
        ("train: {schedule: trapezoid, max_iters: 300, warmup_iters: 9, cooldown_iters: 292}\n",
         "warmup_iters 9 + cooldown_iters 292 is more than max_iters 300; set --warmup_iters=auto "
         "--cooldown_iters=auto, or"),
        ("model: {dropout: 1.0}\n", "must be auto or a number in [0, 1), but is 1.0"),
        ("model: {positions: rope, n_embd: 12}\n", "rope", "the head size is 3", "even"),
        ("model: {positions: rope, block_size: 1048576}\n", "rope", "33,554,432 angles",
         "8,388,608"),
    ],
    "-": [
        ("data: {sources: http://example.org/a.txt}\n", "'http://example.org/a.txt'",
         "https://HOST/FOLDER/FILE#sha256="),
        ("data: {sources: []}\n", "sources must be a list of strings, but is []"),
        ("seed: 1\nmodel: {n_head: ]}\n", "line 2", "check the brackets, quotes and indentation"),
    ],
}  # fmt: skip

VALID = [  # content of the file, resulting settings
    ("model: {n_layer: 6.0}\n", {"n_layer": 6}),
    ("train: {learning_rate: 1e-3}\n", {"learning_rate": 0.001}),
    ("train: {weight_decay: .5, grad_clip: 5.}\n", {"weight_decay": 0.5, "grad_clip": 5.0}),
    ("train: {max_iters: 3e4, eval_interval: 1.0e3}\n", {"max_iters": 30_000}),
    ("seed: 7\n".encode("utf-8-sig"), {"seed": 7}),
    ("seed: 7\n".encode("utf-16"), {"seed": 7}),
    (b"\xfe\xff" + "seed: 7\n".encode("utf-16-be"), {"seed": 7}),
    ("out_dir: 010\n", {"out_dir": "010"}),  # a text may look like a number
    ("out_dir: 'null'\n", {"out_dir": "null"}),
    ('model: {"dropout": "auto"}\n', {"dropout": "auto"}),
    ("data: {sources: book.txt}\n", {"sources": ("book.txt",)}),
    (f"data: {{sources: ['https://a.org/b/c#sha256={'0a' * 32}', b]}}\n", {}),
]


def write(folder: Path, content: str | bytes) -> str:
    file = folder / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def error_message(*argv: str) -> str:
    """Return the error message for the arguments: exit code 2, one line, no control characters."""
    with pytest.raises(ConfigError) as caught:
        parse_train(list(argv))
    message = printed(caught.value)
    assert caught.value.exit_code == 2 and len(message) < 1000
    return message


@pytest.mark.parametrize(
    "row",
    [row for rows in INVALID.values() for row in rows],
    ids=[f"{name}-{i}" for name, rows in INVALID.items() for i in range(len(rows))],
)
def test_an_invalid_config_is_rejected_in_one_line_that_names_the_file(row, tmp_path):
    content, *fragments = row
    file = write(tmp_path, content)
    message = error_message(file)
    assert message.startswith(f"{file}: ")
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("content, expected", VALID, ids=range(len(VALID)))
def test_a_valid_value_is_converted_to_the_type_of_its_setting(content, expected, tmp_path):
    config = to_dict(parse_train([write(tmp_path, content)]).new_settings())
    found = {**config, **config["data"], **config["model"], **config["train"]}
    for name, value in expected.items():
        assert found[name] == value and type(found[name]) is type(value)


def test_a_config_is_looked_for_here_and_then_beside_the_code(tmp_path, monkeypatch):
    shipped = parse_train([str(ROOT / "configs/smoke.yaml")]).new_settings()
    monkeypatch.chdir(tmp_path)
    assert parse_train(["configs/smoke.yaml"]).new_settings() == shipped
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/smoke.yaml").write_text("seed: 9\n")
    assert parse_train(["configs/smoke.yaml"]).new_settings().seed == 9


@pytest.mark.parametrize(
    "wrong",
    ["configs/shakespear.yaml", "shakespeare", "shakespeare.yml", "config/shakespeare.yaml"],
)
def test_a1_a_missing_file_is_rejected_with_the_most_similar_name(wrong, monkeypatch):
    monkeypatch.chdir(ROOT)
    expected = f"{wrong}: no such config; did you mean configs/shakespeare.yaml?"
    assert error_message(wrong) == expected


def test_a1_without_a_similar_name_all_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = ", ".join(f"configs/{path.name}" for path in SHIPPED)
    assert error_message("zzzz\x1b") == f"zzzz\\x1b: no such config; allowed: {names}"
    monkeypatch.chdir(tmp_path)
    assert error_message("zzzz") == "zzzz: no such config; allowed: configs/shakespeare.yaml"


def test_a1_a_misspelled_file_or_folder_of_ones_own_is_found(tmp_path):
    file = write(tmp_path, "seed: 1\n")
    for wrong in (tmp_path / "confg.yaml", f"{tmp_path}e/config.yaml"):
        assert error_message(str(wrong)) == f"{wrong}: no such config; did you mean {file}?"


def test_a2_a_folder_is_rejected_with_a_config_in_it(tmp_path):
    message = "is a folder; give a config file, such as "
    assert f"{message}configs/shakespeare.yaml" in error_message(str(tmp_path))
    file = write(tmp_path, "seed: 1\n")
    assert f"{message}{file}" in error_message(str(tmp_path))


def test_a3_an_unreadable_file_is_rejected(tmp_path, monkeypatch):
    file = write(tmp_path, "seed: 1\n")

    def denied(*_):  # root may read anything, so simulate the error
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open", denied, raising=False)
    assert error_message(file) == (
        f"{file}: cannot be read: Permission denied; give a YAML file of settings"
    )
    monkeypatch.undo()
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert "cannot be read" in error_message(str(loop))
    long = "y" * 5000 + "x" * 300
    assert f"{'x' * 140}: cannot be read: File name too long" in error_message(long)


def test_a32_only_a_regular_file_of_at_most_1_mb_is_read(tmp_path):
    assert parse_train([write(tmp_path, b"seed: 1 #" + b"x" * 999_991)]).new_settings().seed == 1
    too_large = write(tmp_path, b"seed: 1 #" + b"x" * 999_992)
    assert "at most 1,000,000 are read" in error_message(too_large)
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        assert "not a regular file" in error_message(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_equals_its_printed_form(path, tmp_path):
    config = parse_train([str(path)]).new_settings()
    assert parse_train([write(tmp_path, to_yaml(config))]).new_settings() == config
    assert from_dict(to_dict(config)) == config


def test_a_config_of_a_text_and_sizes_has_the_architecture_and_optimizer_of_the_main_recipe(
    tmp_path,
):
    sizes = "model: {n_layer: 6, n_head: 6, n_embd: 384, block_size: 256}"
    lengths = "train: {batch_size: 64, max_iters: 5000}"
    file = write(tmp_path, f"data: {{sources: book.txt}}\n{sizes}\n{lengths}\n")
    own = parse_train([file]).new_settings()
    main = parse_train([str(ROOT / "configs/shakespeare.yaml")]).new_settings()
    for section in ("model", "train"):
        found, expected = vars(getattr(own, section)), vars(getattr(main, section))
        assert {name for name in found if found[name] != expected[name]} <= {
            *("n_layer", "n_head", "n_embd", "block_size", "kernel", "dropout", "logit_scale"),
            *("batch_size", "max_iters", "eval_interval"),
        }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_recipe_says_only_what_differs_from_the_defaults(path):
    if not path.stem.startswith("nanogpt"):  # those say nanoGPT's values in full
        said, defaults = parse_train([str(path)]).file, flat_settings(Config())
        assert [name for name in said if name in defaults and said[name] == defaults[name]] == []


def test_printed_text_is_escaped_and_loads_as_the_same_text(tmp_path):
    special = "\t\n\r\x1b\x85\xa0\u2028\u2029\u202e\ufeff\U0001f3ad#':,-"
    for text in [*special, "null", "None", "1e3", "a: b", " a ", "а\nб"]:
        printed = to_yaml(replace(Config(), out_dir=text, data=DataConfig(sources=(text, "x"))))
        config = parse_train([write(tmp_path, printed)]).new_settings()
        assert (config.out_dir, config.data.sources) == (text, (text, "x"))
        assert escape(printed, keep="\n") == printed
    assert "книга" in to_yaml(replace(Config(), out_dir="книга"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset[0])
def test_the_preset_for_each_text_size_is_a_valid_config_of_suitable_size(preset):
    name, characters, _ = preset
    config = parse_train([str(ROOT / name)]).new_settings()
    assert size_advice(estimate_parameters(config.model, 100), min(characters, 10**9)) is None
    assert config.model.dropout != 0 or name == "configs/mytext_gpu.yaml"


INVALID_TREES = [
    None, [], "x", {"modle": {}}, {10**9999: 2}, {"model": 3}, {"model": {"n_heads": 4}},
    {"train": None}, {"model": {"n_layer": True}}, {"seed": False}, {"compile": 1},
    {"dtype": ["auto"]},
]  # fmt: skip
INVALID_VALUES = [
    None, {}, [], "6", True, 10**9999, float("nan"), float("inf"), -1, b"6", {"a": 1}, ["a", 1],
    "\ud800",
]  # fmt: skip


def test_the_config_of_a_checkpoint_is_validated_like_a_file():
    for wrong in INVALID_TREES:
        with pytest.raises(ConfigError):
            from_dict(wrong)
    for name in settings_of(Config):
        section, _, key = name.rpartition(".")
        for value in INVALID_VALUES:
            try:
                from_dict({section: {key: value}} if section else {key: value})
            except ConfigError as error:
                assert len(printed(error)) < 1000


def test_each_of_the_first_five_wrong_settings_of_a_file_is_a_line(tmp_path, capsys):
    path = tmp_path / "many.yaml"
    path.write_text("sead: 1\nmodel:\n  n_layer: 0\n  heads: 4\ntrain: 3\nseed: x\ncompile: yes\n")
    assert exit_code(train_main, [str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    faults = [
        "line 1: unknown key 'sead'",
        "line 3: n_layer must be",
        "line 4: unknown key 'heads'",
        "line 5: train must be a mapping",
        "line 6: seed must be",
    ]
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults, strict=True):
        assert line.startswith(f"error: {path}: {fault}")
