"""Command lines: every setting is an option, every error is one line, --help lists all settings."""

import re
from pathlib import Path

import pytest

from common.errors import ConfigError
from configs.command import (
    Command,
    CommandLineOptions,
    parse_sample_options,
    parse_train,
    sample_help,
    train_help,
)
from configs.fields import settings_of
from configs.options import options_of
from configs.schema import Config, SampleConfig
from tests.conftest import ROOT, printed

SMOKE = str(ROOT / "configs/smoke.yaml")

TRAIN_SPELLINGS = [  # arguments, setting, value
    (["--model.n_layer=3"], "model.n_layer", 3),
    (["--model.n_layer", "3"], "model.n_layer", 3),
    (["--n-layer", "3"], "model.n_layer", 3),
    (["--train.max-iters=1e4"], "train.max_iters", 10_000),
    (["--out_dir=a=b=c"], "out_dir", "a=b=c"),
    (["--out-dir=null"], "out_dir", "null"),
    (["--compile"], "compile", True),
    (["--model.bias"], "model.bias", True),
    (["--dropout=auto"], "model.dropout", "auto"),
    (["--sources=[a.txt, 'b, c.txt']"], "data.sources", ("a.txt", "b, c.txt")),
    (["--sources=a.txt", "--data.sources=b.txt"], "data.sources", ("a.txt", "b.txt")),
]
SAMPLE_SPELLINGS = [  # those of sample.py
    (["--prompt", ""], "prompt", ""),
    (["--prompt=--help me"], "prompt", "--help me"),
    (["--prompt", "- yes"], "prompt", "- yes"),
    (["--start", "a\nb"], "prompt", "a\nb"),
    (["--num_samples", "3"], "num_samples", 3),
    (["--temperature", "0"], "temperature", 0.0),
    (["--stop=[", "--stop=null"], "stop", ("[", "null")),
    (["--no-cache"], "cache", False),
    ([], "attention", "saved"),
]

# what the values of a config file cannot have as well: for those see test_config.py
INVALID_TRAIN = [  # arguments after the config, and words of the message
    (["--train.n_head=4"], "unknown option '--train.n_head'", "did you mean --n_head?"),
    (["--"], "unknown option '--'"),
    (["--\x1b[2J=4"], "unknown option '--\\x1b[2J'"),
    (["--epochs=3"], "did you mean --max_iters? (max_iters counts steps, not epochs)"),
    (["--lr=1"], "did you mean --learning_rate? (with optimizer muon, also --muon_learn"),
    (["--n_layer", "-1"], "--n_layer: ", "must be an integer in [1, 512], but is -1"),
    (["--seed="], "seed has no value"),
    (["--seed"], "--seed: has no value", "an integer in [0, 4294967295]", "--seed=VALUE"),
    (["--seed", "--compile"], "--seed: has no value"),
    (["--resume="], "--resume: ", "must be a string", "''"),
    (["--n_layer=3", "--seed=1", "--n_layer=5"],
     "duplicate option 'model.n_layer' ('--n_layer=3' and '--n_layer=5'); keep one of them"),
    (["--resume", "--resume=out/a"], "duplicate option 'resume'"),
    (["--sources=[a"], "--sources: ", "brackets"),
    (["--data.encoding=utf8x"], "encoding: 'utf8x' does not work", "gb18030"),
    (["--data.encoding=utf-16"], "encoding: 'utf-16' does not work", "utf-16-le",
     "a file with a byte order mark needs none"),
    (["--resume", "--overwrite"], "--resume and --overwrite contradict"),
    (["--allow-data-change"], "only applies together with --resume"),
    # --resume never takes the next argument as its value
    (["--resume", "out/a"], "one config file", "'out/a'", "--resume=PATH"),
    (["--out_dir=\udcff"], "'--out_dir=\\udcff' is not UTF-8"),
]  # fmt: skip
INVALID_SAMPLE = [
    ([], "--ckpt is missing", "write --ckpt=VALUE: checkpoint file"),
    (["--ckpt="], "--ckpt: ", "ckpt must be a string, but is ''"),
    (["--ckpt", "--prompt", "x"], "--ckpt: has no value"),
    (["--ckpt=x", "--min_p=1"], "must be a number in [0, 1), but is 1.0"),
    (["--ckpt=x", "--length=9"], "unknown option '--length'; did you mean --max_new_tokens?"),
    (["--ckpt=x", "--prompt=a", "--start", "b"], "('--prompt=a' and '--start')"),
    (["--ckpt=x", "--no-cache=true"], "--no-cache: takes no value"),
    (["--ckpt=x", "ROMEO:"], "unexpected argument 'ROMEO:'", '--prompt="TEXT"', "--help"),
    (["--ckpt=x", "--html=x", "--score=y"], "--score and --html contradict"),
    (["--ckpt=x", "--novel=y", "--interactive"], "--novel and --interactive contradict"),
    (["--ckpt=x", "--ckpt=y"], "duplicate option 'ckpt' ('--ckpt=x' and '--ckpt=y')"),
]  # fmt: skip


def error_message(load_arguments, argv) -> str:
    with pytest.raises(ConfigError) as caught:
        load_arguments(argv)
    message = printed(caught.value)
    assert caught.value.exit_code == 2 and len(message) < 1000
    return message


@pytest.mark.parametrize(
    "parse, argv, name, expected",
    [(parse_train, *row) for row in TRAIN_SPELLINGS]
    + [(parse_sample_options, *row) for row in SAMPLE_SPELLINGS],
)
def test_every_form_of_an_option_sets_its_setting(parse, argv, name, expected):
    if parse is parse_train:
        configs = [parse(words).new_settings() for words in ([SMOKE, *argv], [*argv, SMOKE])]
    else:
        configs = [parse(["--ckpt=x", *argv])]
    for found in configs:
        for key in name.split("."):
            found = getattr(found, key)
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    "parse, row",
    [(parse_train, ([SMOKE, *argv], *fragments)) for argv, *fragments in INVALID_TRAIN]
    + [(parse_sample_options, row) for row in INVALID_SAMPLE],
    ids=lambda each: repr(each[0][-1:])[:30] if isinstance(each, tuple) else each.__name__,
)
def test_an_invalid_argument_is_rejected_in_one_line(parse, row):
    argv, *fragments = row
    message = error_message(parse, argv)
    for fragment in fragments:
        assert fragment in message


def typos(name):
    """Yield `name` with each letter left out, doubled, replaced, or swapped with the next."""
    for i in range(len(name)):
        before, letter, after = name[:i], name[i], name[i + 1 :]
        yield from (before + after, before + 2 * letter + after, before + "x" + after)
        yield before + after[:1] + letter + after[1:]


# pairs that differ by one letter
TWINS = {"top_k": "top_p", "top_p": "top_k", "beta1": "beta2", "beta2": "beta1"}


@pytest.mark.parametrize(
    "load_arguments, sections",
    [(parse_train, (CommandLineOptions, Config)), (parse_sample_options, (SampleConfig,))],
)
def test_the_error_for_a_mistyped_setting_suggests_the_right_one(load_arguments, sections):
    known = [name for section in sections for name in settings_of(section)]
    for name in known:
        for typo in {each for each in typos(name) if each not in known}:
            key = name.rpartition(".")[2]
            message = error_message(load_arguments, [f"--{typo}=1"])
            actual = re.search(r"did you mean --(?:\w+\.)?(\w+)\?$", message)
            assert actual and actual[1] in (key, TWINS.get(key)), message


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_the_error_for_a_mistyped_config_suggests_the_right_one(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    name = f"configs/{path.name}"
    for typo in {each for each in typos(name) if not Path(each).exists()}:
        message = error_message(parse_train, [typo])
        assert "no such config" in message
        # nanogpt_cpu and nanogpt_gpu differ by one letter
        assert name.replace("gpu", "cpu") in message.replace("gpu", "cpu"), typo


def test_an_error_across_file_and_options_names_both():
    message = error_message(parse_train, [SMOKE, "--n_head=5"])
    assert message.startswith(f"{SMOKE} and the options: n_embd 64 is not divisible")


@pytest.mark.parametrize(
    "words, given",
    [
        ([], "none"),
        (["a.yaml", "b.yaml"], "['a.yaml', 'b.yaml'];"),
        (["a.yaml"] * 1000, "['a.yaml', 'a.yaml', 'a.yaml', ...];"),
    ],
    ids=["none", "two", "many"],
)
def test_exactly_one_config_file_is_required(words, given):
    expected = "takes one config file, such as configs/shakespeare.yaml, but is given "
    assert expected + given in error_message(parse_train, words)


def test_settings_without_an_option_have_the_value_of_the_file_or_the_default():
    plain, changed = parse_train([SMOKE]), parse_train([SMOKE, "--n_layer=5"]).new_settings()
    assert plain == Command(config_file=SMOKE, file=plain.file, started=plain.started)
    assert (changed.model.n_layer, changed.model.n_embd) == (5, 64)
    assert changed.train == plain.new_settings().train


def test_actions_are_parsed():
    assert parse_train([SMOKE, "--resume"]).resume == "auto"
    assert parse_train(["--resume", SMOKE]).resume == "auto"
    assert parse_train([SMOKE, "--resume=out/a"]).resume == "out/a"
    assert parse_train([SMOKE, "--overwrite", "--init-from=a.pt"]).init_from == "a.pt"


def test_print_config_prints_the_settings_as_a_config_file_with_the_same_meaning(capsys, tmp_path):
    with pytest.raises(SystemExit) as ending:
        parse_train([SMOKE, "--n_layer=3", "--print-config"])
    assert ending.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse_train([str(tmp_path / "printed.yaml")]).new_settings() == (
        parse_train([SMOKE, "--n_layer=3"]).new_settings()
    )


def test_out_dir_is_named_after_the_config_by_default():
    assert parse_train([SMOKE]).out_dir == "out/smoke"
    assert parse_train([SMOKE]).new_settings().out_dir == "out/smoke"
    assert parse_train([SMOKE, "--out_dir=out/mine"]).out_dir == "out/mine"


@pytest.mark.parametrize(
    "text, sections",
    [(train_help(), (CommandLineOptions, Config)), (sample_help(), (SampleConfig,))],
)
def test_help_lists_every_setting_with_its_description_range_and_choices(text, sections):
    text_in_one_line = " ".join(text.split())
    for section in sections:
        for name, field in settings_of(section).items():
            assert f"\n  --{name}" in text
            assert (
                field.metadata["meaning"] in text_in_one_line
                and field.metadata["within"] in text_in_one_line
            )
            assert all(choice in text_in_one_line for choice in field.metadata["choices"])
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii()


def test_help_names_every_option_that_torchrun_rejects_with_the_form_that_works(capsys):
    run = pytest.importorskip("torch.distributed.run")
    parser, rejected = run.get_args_parser(), []
    for name in options_of(CommandLineOptions, Config):
        words = ["configs/smoke.yaml", f"--{name}=1"]
        try:
            parsed = parser.parse_args(["--nproc_per_node=2", "train.py", *words])
            assert parsed.training_script_args == words
        except SystemExit:
            rejected.append(name)
            full = next(full for full in settings_of(Config) if full.endswith(f".{name}"))
            words = ["configs/smoke.yaml", f"--{full}=1"]
            parsed = parser.parse_args(["--nproc_per_node=2", "train.py", *words])
            assert parsed.training_script_args == words
            assert f"rejects --{name} as ambiguous" in train_help()
            assert f"write --{full}." in train_help()
    assert "log" in rejected


@pytest.mark.parametrize(
    "command, code",
    [
        ("train.py --help", 0),
        ("train.py configs/smoke.yaml --print-config", 0),
        ("train.py nowhere.yaml", 2),
        ("train.py configs/smoke.yaml --n_laier=3", 2),
        ("sample.py --help", 0),
        ("sample.py --temp=1", 2),
        ("sample.py --ckpt=x --prompt=FILE:x", 5),
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
