"""Config files: the values of valid ones, and one-line errors for all others."""

import os
import subprocess
import sys
from dataclasses import MISSING, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import files
from common.console import escape
from common.errors import ConfigError
from configs.cli import parse_train
from configs.fields import check_value, settings_of, value_type
from configs.schema import (
    LAYOUTS,
    SMALLEST_NGRAM,
    Config,
    DataConfig,
    ModelConfig,
    SampleConfig,
    TrainConfig,
    estimate_parameters,
    from_dict,
    to_dict,
)
from configs.strict_yaml import to_yaml
from data.summary import PRESETS, size_advice
from tests.commands import exit_code, train_main
from tests.conftest import ROOT, printed

# raised by chr(0xFFFFFFFF)
TOO_LARGE = "OverflowError" if sys.version_info < (3, 13) else "ValueError"
ONE_OF_LAYOUTS = f"one of {', '.join(LAYOUTS)}"
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
NANOGPT = {  # nanoGPT's settings, under our names
    "nanogpt_cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "dropout": 0.0},
        "train": {"batch_size": 12, "max_iters": 2000},
    },
    "nanogpt_gpu": {
        "model": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "dropout": 0.2},
        "train": {"batch_size": 64, "max_iters": 5000},
    },
}
NANOGPT_MODEL = {
    "positions": "learned",
    "norm": "layernorm",
    "mlp": "gelu",
    "bias": False,
    "tied": True,
}
NANOGPT_TRAIN = {
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "min_lr_ratio": 0.1,
    "schedule": "cosine",
    "beta1": 0.9,
}
NANOGPT_TRAIN |= {"beta2": 0.99, "warmup_iters": 100, "weight_decay": 0.1, "grad_clip": 1.0}
NANOGPT_TRAIN |= {"gradient_accumulation_steps": 1}

INVALID = [  # content of the file, and words of the message
    ("", "config is empty"),
    ("# only\n# comments\n", "config is empty"),
    ("---\n", "config is empty"),
    ("- model\n- train\n", "must be a mapping"),
    ("just words\n", "must be a mapping"),
    ("null\n", "must be a mapping"),
    ("model: 6\n", "line 1", "model must be a mapping"),
    ("model:\n", "line 1", "model must be a mapping"),
    ("seed:1\n", "must be a mapping", "missing space after ':' in 'seed:'"),
    ("model:\n  n_layer:4\n  n_head: 4\n", "line 3", "missing space after ':' in 'n_layer:'"),
    ("model:\n  n_head: 4\n  n_layer:4\n", "missing space after ':' in 'n_layer:'"),
    ("model:\n  n_layer:4\n", "missing space after ':' in 'n_layer:'"),
    (
        "seed: 1\n\nmodel:\n  n_heads: 4\n",
        "unknown key 'n_heads'",
        "line 4",
        "did you mean model.n_head?",
    ),
    ("n_head: 4\n", "unknown key 'n_head'", "line 1", "did you mean model.n_head?"),
    ("train:\n  n_head: 4\n", "unknown key 'n_head'", "line 2", "did you mean model.n_head?"),
    ("modle:\n  n_head: 4\n", "unknown key 'modle'", "line 1", "did you mean model?"),
    ("model.n_head: 4\n", "unknown key 'model.n_head'", "line 1"),
    ("data: {seed: 4}\n", "unknown key 'seed'", "line 1", "did you mean seed?"),
    ("train: {ema: 0.9}\n", "unknown key 'ema'", "line 1"),  # once a setting
    ("model: {ngram_model: 7}\n", "unknown key 'ngram_model'", "line 1"),  # too
    ("zzz: 4\n", "unknown key 'zzz'", "line 1", "python train.py --help lists all"),
    ("model: {attention: flsh}\n", "line 1", ONE_OF_LAYOUTS, "'flsh'"),
    ("model: {attention: Heads}\n", ONE_OF_LAYOUTS, "'Heads'"),
    (
        'model:\n  n_layer: "6"\n',
        "line 2",
        "must be an integer in [1, 512]",
        "is a string",
        "remove the quotes",
    ),
    ("compile: 'true'\n", "must be true or false", "is a string"),
    ("model: {n_layer: 6.5}\n", "must be an integer", "6.5"),
    ("seed: 010\n", "'010' has a leading zero"),
    ("seed: -0_1\n", "leading zero"),
    ("train: {batch_size: 1:30}\n", "must be an integer", "'1:30' is a time of day"),
    ("model: {dropout: on}\n", "must be auto or a number in [0, 1)", "'on'"),
    ("model: {n_layer: true}\n", "must be an integer", "'true'"),
    ("compile: yes\n", "must be true or false", "'yes'"),
    ("compile: 1\n", "must be true or false", "'1'"),
    ("no: 1\n", "unknown key 'no'"),
    ("train:\n  learning_rate:\n", "line 2", "learning_rate has no value"),
    ("seed: ~\n", "seed has no value"),
    ("seed: null\n", "seed has no value"),
    ("train: {learning_rate: None}\n", "'None' is not a value"),
    ("out_dir:\n", "out_dir has no value"),
    ("out_dir: ''\n", "out_dir must be a string", "''"),
    ("train: {learning_rate: .nan}\n", "'.nan' is not finite"),
    ("train: {grad_clip: .inf}\n", "'.inf' is not finite"),
    ("train: {grad_clip: -Infinity}\n", "'-Infinity' is not finite"),
    ("train: {grad_clip: 1.0e+400}\n", "inf, which is not finite"),
    ("model: {n_layer: 0}\n", "must be an integer in [1, 512], but is 0"),
    ("model: {block_size: -1}\n", "must be an integer in [1, 1048576], but is -1"),
    ("train: {learning_rate: 0}\n", "must be a number in (0, 10], but is 0.0"),
    ("seed: 4294967296\n", "in [0, 4294967295], but is 4294967296"),
    (
        "model: {n_embd: 384, n_head: 5}\n",
        "n_embd 384 is not divisible by n_head 5; nearest n_head: 6, 4",
    ),
    (
        "model: {ngram_embeddings: 2}\n",
        "the shortest has 3 characters; allowed: 0 for none, or 3 to 16; set token_shifts for",
    ),
    (
        "model:\n  n_layer: 4\n  n_head: 4\n  n_layer: 6\n",
        "duplicate key 'n_layer' (lines 2 and 4)",
    ),
    ("model: {n_layer: 2}\nmodel: {n_head: 2}\n", "duplicate key 'model' (lines 1 and 2)"),
    ('seed: 1\n"seed": 2\n', "duplicate key 'seed' (lines 1 and 2)"),
    ("model:\n\tn_layer: 4\n", "tab at line 2"),
    ("seed: 1\n---\nseed: 2\n", "line 2", "a second document"),
    ("seed: 1\n...\n---\n", "line 3", "a second document"),
    (b"# caf\xe9\nseed: 1\n", "invalid utf-8 at byte 5"),
    (b"\xef\xbb\xbf# caf\xe9\n", "invalid utf-8 at byte 8"),
    (b"\xff\xfes\x00e", "invalid utf-16", "at byte 4"),
    ("seed: 1\nout_dir: a\0b\n", "line 2", "control character '\\x00'"),
    ("seed: 1 # \x1b[2J\n", "line 1", "control character '\\x1b'"),
    ('out_dir: "a\\0b"\n', "out_dir must be a string", "'a\\x00b'"),
    ('out_dir: "\\ud800"\n', "out_dir must be a string", "'\\ud800'"),
    ('"\\e[2J": 1\n', "unknown key '\\x1b[2J'"),
    ('model: {attention: "\\e]0;x\\a\\u202e"}\n', "'\\x1b]0;x\\x07\\u202e'"),
    ("seed: !!python/object/apply:os.system [ls]\n", "line 1", "tags such as", "not supported"),
    ("seed: !!int 1\n", "tags such as 'tag:yaml.org,2002:int' are not supported"),
    ("!!map {seed: 1}\n", "tags such as"),
    ("!mine seed: 1\n", "tags such as '!mine'"),
    ("compile: !!bool maybe\n", "tags such as"),
    ("seed: !!timestamp x\n", "tags such as"),
    ("seed: 2024-13-45\n", "must be an integer", "'2024-13-45' is not a plain number"),
    ("[" * 2000, "line 1", "nested too deep"),
    ("seed: " + "{a: " * 2000, "nested too deep"),
    ("- " * 2000, "nested too deep"),
    ("a: &a [*a]\n", "line 1", "aliases are not supported"),
    ("a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "aliases are not supported"),
    ("model:\n  n_layer: *a\n", "line 2", "aliases are not supported"),
    ("seed: " + "9" * 5000 + "\n", "has more than 40 characters"),
    ("seed: 0x" + "f" * 30 + "\n", "is not a plain number"),
    ("seed: 0x10\n", "'0x10' is not a plain number"),
    ("seed: 1_000\n", "'1_000' is not a plain number"),
    ("seed: ６\n", "'６' is not a plain number"),
    ('seed: "\\UFFFFFFFF"\n', f"not YAML ({TOO_LARGE})", "write lines of key: value"),
    (
        "%YAML " + "9" * 5000 + ".1\n---\nseed: 1\n",
        "not YAML (ValueError)",
        "write lines of key: value",
    ),
    ("seed: [" + "1," * 9_990 + "1]\n", "is a list"),
    (
        "seed: [" + "1," * 20_000 + "1]\n",
        "line 1",
        "too long for a config; at most 10,000 keys, values",
    ),
    ("data:\n- \n" * 100_000, "too long for a config"),
    ("data:\n- a\n" * 1_000, "duplicate key 'data' (lines 1 and 3)"),
    ("train: {warmup_iters: 3000}\n", "warmup_iters 3000 is more than max_iters 2000"),
    (
        "train: {schedule: trapezoid, warmup_iters: 1500}\n",
        "warmup_iters 1500 + cooldown_iters 800 is more than max_iters 2000",
        "; shorten the warm-up or",
    ),
    (
        "train: {schedule: trapezoid, max_iters: 300, cooldown_iters: 1100}\n",
        "warmup_iters 100 + cooldown_iters 1100 is more than max_iters 300; set cooldown_iters "
        "to auto or",
    ),
    ("train: {min_lr_ratio: 2}\n", "must be a number in [0, 1], but is 2.0"),
    ("train: {eval_interval: 0}\n", "must be an integer in [1, 1e9], but is 0"),
    ("model: {dropout: 1.0}\n", "must be auto or a number in [0, 1), but is 1.0"),
    ("model: {positions: rope, n_embd: 12}\n", "rope", "the head size is 3", "even"),
    ("model: {positions: rope, block_size: 1048576}\n", "rope", "33,554,432 angles", "8,388,608"),
    ("model: {n_layer: 512, n_embd: 65536}\n", "26,388,283,260,928 parameters needs", "GB"),
    (
        "data: {sources: http://example.org/a.txt}\n",
        "'http://example.org/a.txt'",
        "https://HOST/FOLDER/FILE#sha256=",
    ),
    ("data: {sources: [https://example.org/a.txt]}\n", "'https://example.org/a.txt'", "SHA-256"),
    (f"data: {{sources: 'https://example.org/a.txt#sha256={'0' * 63}'}}\n", "64 hex digits"),
    ("data: {sources: []}\n", "sources must be a list of strings, but is []"),
    ("data: {sources: [a, [b]]}\n", "sources must be a list of strings, but is ['a', a list]"),
    (
        'data: {sources: ["\\ud800", "", c, d]}\n',
        "a list of strings, but is ['\\ud800', '', 'c', ...]",
    ),
    ("data: {sources: {a: b}}\n", "sources must be a list of strings, but is a mapping"),
    ("seed: 1\nmodel: {n_head: ]}\n", "line 2", "check the brackets, quotes and indentation"),
    ("model: {n_layer: [4]}\n", "n_layer must be an integer", "is a list"),
    ("? [a]\n: 1\n", "a key must be a word"),
]

VALID = [  # content of the file, resulting settings
    ("model: {n_layer: 6.0}\n", {"n_layer": 6}),
    ("train: {learning_rate: 1e-3, weight_decay: .5, grad_clip: 5.}\n", {"learning_rate": 0.001}),
    ("train: {learning_rate: 1}\n", {"learning_rate": 1.0}),
    ("train: {max_iters: 1e4}\n", {"max_iters": 10_000}),
    (
        "train: {max_iters: 3e4, eval_interval: 1.0e3}\n",
        {"max_iters": 30_000, "eval_interval": 1000},
    ),
    ("seed: 7\n".encode("utf-8-sig"), {"seed": 7}),
    ("seed: 7\n".encode("utf-16"), {"seed": 7}),
    (b"\xfe\xff" + "seed: 7\n".encode("utf-16-be"), {"seed": 7}),
    (b"seed: 7\r\nout_dir: x\r\n", {"seed": 7, "out_dir": "x"}),
    ("out_dir: 010\n", {"out_dir": "010"}),  # a text may look like a number
    ("out_dir: 'null'\n", {"out_dir": "null"}),
    ("compile: true\n", {"compile": True}),
    ('model: {"attention_dropout": "auto"}\n', {"attention_dropout": "auto"}),
    ("model: {attention_dropout: 0}\ntrain: {save_interval: 5e1}\n", {"attention_dropout": 0.0}),
    ("model: {}\nseed: 7\n", {"seed": 7}),
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


@pytest.mark.parametrize("row", INVALID, ids=lambda row: repr(row[0][:24]))
def test_an_invalid_config_is_rejected_in_one_line_that_names_the_file(row, tmp_path):
    content, *fragments = row
    file = write(tmp_path, content)
    message = error_message(file)
    assert message.startswith(f"{file}: ")
    for fragment in fragments:
        assert fragment in message


def test_a_config_is_looked_for_here_and_then_beside_the_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        parse_train(["configs/smoke.yaml"]).config
        == parse_train([str(ROOT / "configs/smoke.yaml")]).config
    )
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/smoke.yaml").write_text("seed: 9\n")
    assert parse_train(["configs/smoke.yaml"]).config.seed == 9


@pytest.mark.parametrize("content, expected", VALID, ids=range(len(VALID)))
def test_a_valid_value_is_converted_to_the_type_of_its_setting(content, expected, tmp_path):
    config = parse_train([write(tmp_path, content)]).config
    found = {
        **to_dict(config),
        **to_dict(config)["data"],
        **to_dict(config)["model"],
        **to_dict(config)["train"],
    }
    for name, value in expected.items():
        assert found[name] == value and type(found[name]) is type(value)


def test_a1_a_missing_file_is_rejected_with_the_most_similar_name(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for wrong in (
        "configs/shakespear.yaml",
        "shakespeare",
        "shakespeare.yml",
        "config/shakespeare.yaml",
    ):
        assert (
            error_message(wrong)
            == f"{wrong}: no such config; did you mean configs/shakespeare.yaml?"
        )
    write(tmp_path, "seed: 1\n")
    assert f"did you mean {tmp_path}/config.yaml?" in error_message(str(tmp_path / "confg.yaml"))
    available = ", ".join(
        sorted(f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml"))
    )
    assert error_message("zzzz\x1b") == f"zzzz\\x1b: no such config; allowed: {available}"
    monkeypatch.chdir(tmp_path / "..")
    assert error_message("zzzz") == "zzzz: no such config; allowed: configs/shakespeare.yaml"
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    wrong = f"{tmp_path}e/config.yaml"  # the folder is misspelled
    assert error_message(wrong) == f"{wrong}: no such config; did you mean {tmp_path}/config.yaml?"


def test_a2_a_folder_is_rejected_with_a_config_in_it(tmp_path):
    assert "is a folder; give a config file, such as configs/shakespeare.yaml" in error_message(
        str(tmp_path)
    )
    file = write(tmp_path, "seed: 1\n")
    assert f"give a config file, such as {file}" in error_message(str(tmp_path))


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
    assert f"{'x' * 140}: cannot be read: File name too long" in error_message(
        "y" * 5000 + "x" * 300
    )


def test_a32_only_a_regular_file_of_at_most_1_mb_is_read(tmp_path):
    assert "at most 1,000,000 are read" in error_message(
        write(tmp_path, b"seed: 1 #" + b"x" * 1_000_000)
    )
    assert parse_train([write(tmp_path, b"seed: 1 #" + b"x" * 999_991)]).config.seed == 1
    assert "not a regular file" in error_message("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in error_message(str(tmp_path / "pipe"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_equals_its_printed_form(path, tmp_path):
    config = parse_train([str(path)]).config
    assert parse_train([write(tmp_path, to_yaml(config))]).config == config
    assert from_dict(to_dict(config)) == config


def test_printed_text_is_escaped_and_loads_as_the_same_text(tmp_path):
    special = "\t\n\r\x1b\x85\xa0\u2028\u2029\u202e\ufeff\U0001f3ad#':,-"
    for text in [*special, "null", "None", "1e3", "a: b", " a ", "а\nб"]:
        printed = to_yaml(replace(Config(), out_dir=text, data=DataConfig(sources=(text, "x"))))
        config = parse_train([write(tmp_path, printed)]).config
        assert (config.out_dir, config.data.sources) == (text, (text, "x"))
        assert escape(printed, keep="\n") == printed
    assert "книга" in to_yaml(replace(Config(), out_dir="книга"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset[0])
def test_the_preset_for_each_text_size_is_a_valid_config_of_suitable_size(preset):
    name, characters, _ = preset
    config = parse_train([str(ROOT / name)]).config
    assert size_advice(estimate_parameters(config.model, 100), min(characters, 10**9)) is None
    assert config.model.dropout != 0 or name == "configs/mytext_gpu.yaml"


@pytest.mark.parametrize("name", NANOGPT)
def test_the_nanogpt_configs_have_the_settings_of_nanogpt(name):
    config = to_dict(parse_train([str(ROOT / f"configs/{name}.yaml")]).config)
    assert config["model"].items() >= (NANOGPT_MODEL | NANOGPT[name]["model"]).items()
    assert config["train"].items() >= (NANOGPT_TRAIN | NANOGPT[name]["train"]).items()
    assert (
        config["model"]["attention_dropout"] == "auto"
        and config["model"]["residual_init"] == "scaled"
    )


def values(field):
    """Return a strategy for the allowed values of a setting; sizes are small, to save memory."""
    choices, allowed_range = field.metadata["choices"], field.metadata["within"]
    choices_strategy = st.sampled_from(choices) if choices else st.nothing()
    if value_type(field) is bool:
        return st.booleans()
    if allowed_range:
        low, high = map(float, allowed_range[1:-1].split(","))
        if value_type(field) is int:
            return choices_strategy | st.integers(int(low), int(min(high, 64)))
        return choices_strategy | st.floats(
            low, high, exclude_min=allowed_range[0] == "(", exclude_max=allowed_range[-1] == ")"
        )
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0:"), min_size=1)
    return (
        choices_strategy
        if choices
        else st.lists(text, min_size=1).map(tuple)
        if value_type(field) is tuple
        else text
    )


def sections(section):
    found = {name: values(field) for name, field in settings_of(section).items() if "." not in name}
    return (
        found | {"encoding": st.sampled_from(["utf-8", "latin-1", "gb18030"])}
        if section is DataConfig
        else found
    )


@given(
    *(
        st.fixed_dictionaries(sections(each))
        for each in (Config, DataConfig, ModelConfig, TrainConfig)
    )
)
@settings(max_examples=60, deadline=None)
def test_any_config_is_unchanged_by_yaml_and_by_a_checkpoint(
    tmp_path_factory, top, data, model, train
):
    model["n_embd"] = 2 * model["n_head"] * (1 + model["n_embd"] % 4)
    if model["ngram_embeddings"] < SMALLEST_NGRAM:
        model["ngram_embeddings"] = 0
    train["max_iters"] = 10 * (train["warmup_iters"] + 7)
    config = from_dict({**top, "data": data, "model": model, "train": train})
    folder = tmp_path_factory.getbasetemp()
    assert parse_train([write(folder, to_yaml(config))]).config == config
    assert from_dict(to_dict(config)) == config


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


def test_each_setting_has_a_description_a_valid_default_and_a_unique_name():
    for section in (Config, SampleConfig):
        found = settings_of(section)
        assert len({field.name for field in found.values()}) == len(found)
        for field in found.values():
            assert len(field.metadata["meaning"]) > 10
            assert field.default is MISSING or check_value(field, field.default) == field.default


def test_estimate_parameters_equals_the_formula():
    classic = ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256)
    assert estimate_parameters(classic, vocab_size=65) == 12 * 6 * 384**2 + (256 + 65) * 384
    assert (
        estimate_parameters(replace(classic, tied=False, positions="rope"), 65)
        == 12 * 6 * 384**2 + 130 * 384
    )
    assert (
        estimate_parameters(replace(classic, token_shifts=2), 65)
        == 12 * 6 * 384**2 + (256 + 195) * 384
    )
    ngrams = replace(classic, ngram_embeddings=4)
    difference = estimate_parameters(ngrams, 65) - estimate_parameters(classic, 65)
    assert difference == 2 * 48 * (4096 + 384)


def test_loading_a_config_and_help_do_not_import_torch():
    code = (
        "import sys; from configs.cli import parse_sample, parse_train, sample_help, train_help; "
        "train_help(); sample_help(); parse_train(['configs/smoke.yaml']); "
        "parse_sample(['--ckpt=x']); "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\n"


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
