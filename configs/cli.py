"""From a command line to checked settings: one parser for train.py and sample.py, driven by the
dataclasses.

Every setting is an option: `--model.n_layer=6`, `--model.n_layer 6`, and `--n_layer=6` where no
other section has that key. Dashes are as good as underscores, nothing is abbreviated, and the last
word counts.
"""

import textwrap
from collections import Counter
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path

from common.errors import ConfigError
from configs.fields import (
    Checked,
    Written,
    allowed,
    did_you_mean,
    is_whole,
    kind,
    place,
    read,
    setting,
    settings_of,
    shown,
)
from configs.schema import Config, SampleConfig, check_memory, from_dict
from configs.strict_yaml import parse, read_config

TRAIN_USAGE = """\
usage: python train.py CONFIG [--section.key=value ...]

  python train.py configs/shakespeare.yaml
  python train.py configs/mytext.yaml --data.sources=book.txt
  python train.py configs/shakespeare.yaml --max_iters=2000 --learning_rate=5e-4
  python train.py configs/shakespeare.yaml --resume
"""
SAMPLE_USAGE = """\
usage: python sample.py --ckpt=FILE|FOLDER [--key=value ...]

  python sample.py --ckpt out/shakespeare --prompt "ROMEO:"
  python sample.py --ckpt out/shakespeare --num-samples=3 --temperature=0.6 --seed=7
"""
NOTES = """
A key needs no section where it is unique; --key value is as good as --key=value, and a dash as an
underscore. A switch needs no value: --key is --key=true. [0, 1) is from 0 to below 1.
"""


@dataclass(frozen=True)
class Actions(Checked):
    """What to do, which no config file says."""

    print_config: bool = setting(False, "print the complete settings as YAML and stop")
    resume: str | None = setting(
        None, "go on from the last checkpoint in out_dir, or of --resume=PATH", alone="auto"
    )
    allow_data_change: bool = setting(False, "with --resume: go on although the text has changed")
    overwrite: bool = setting(False, "start afresh where there is a run")
    init_from: str | None = setting(None, "checkpoint whose weights and vocabulary to start from")
    time_limit: float | None = setting(None, "minutes after which to save and stop", "(0, 1e6]")

    def __post_init__(self):
        super().__post_init__()
        for other in ("overwrite", "init_from"):
            if self.resume and getattr(self, other):
                raise ConfigError(f"--resume and --{other} contradict each other; give one of them")
        if self.allow_data_change and not self.resume:
            raise ConfigError("--allow_data_change is of a run that goes on; give --resume with it")


@dataclass(frozen=True)
class Command(Actions):
    """What train.py is asked to do, and the settings to do it with."""

    config_file: str = ""
    config: Config = field(default_factory=Config)

    @property
    def out_dir(self) -> str:
        """The folder of the run, with auto worked out: out/<name of the config file>."""
        return (
            f"out/{Path(self.config_file).stem}"
            if self.config.out_dir == "auto"
            else self.config.out_dir
        )


def load(argv: list[str]) -> Command:
    """What the arguments of train.py ask for: its config file with the overrides, complete and
    checked.
    """
    words, values = read_arguments(argv, Actions, Config)
    if len(words) != 1:
        given = shown(tuple(words)) if words else "none"
        raise ConfigError(
            f"train.py takes one config file, such as configs/shakespeare.yaml, but is given "
            f"{given}; "
            "an option begins with -- and has its value after =, as in --resume=PATH; see python "
            "train.py --help"
        )
    actions = {name: values.pop(name) for name in settings_of(Actions) if name in values}
    nested = {}
    for name, value in (read_config(words[0]) | values).items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    with place(words[0] + " and the options" * bool(values)):
        config = from_dict(nested)
        check_memory(config.model)
    return Command(config_file=words[0], config=config, **actions)


def load_sample(argv: list[str]) -> SampleConfig:
    """What the arguments of sample.py ask for, complete and checked."""
    words, values = read_arguments(argv, SampleConfig)
    if words:
        raise ConfigError(
            f"unexpected argument {shown(words[0])}; a checkpoint is given as --ckpt=PATH, "
            'a prompt as --prompt="TEXT"; see python sample.py --help'
        )
    return from_dict(values, SampleConfig)


def read_arguments(argv: list[str], *sections: type) -> tuple[list[str], dict[str, object]]:
    """The words that are no options, and the checked values of those that are, by the settings'
    full names.
    """
    options = _options(*sections)
    words, values = [], {}
    for word in argv:
        if not is_whole(word):
            raise ConfigError(f"argument {shown(word)} is not UTF-8 text; write it in UTF-8")
    rest = iter(argv)
    for word in rest:
        if not word.startswith("-"):
            words.append(word)
            continue
        option, equals, text = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if name not in options:
            hint = did_you_mean(
                name, {each: f"--{each}" for each in (*options, "help")}, "--help lists all"
            )
            raise ConfigError(f"unknown option {shown(option)}; {hint}")
        full, this, alone = options[name]
        with place(option):
            if not equals:
                text = alone or next(rest, "--")
                if text.startswith("--"):
                    raise ConfigError(
                        f"has no value; it must be {allowed(this)}; write {option}=VALUE"
                    )
            elif name.startswith("no_"):
                raise ConfigError("takes no value")
            is_list = kind(this) is tuple and text.startswith("[")
            value = read(
                this, parse(text) if is_list else Written(text, plain=kind(this) is not str)
            )
        values[full] = values.get(full, ()) + value if kind(this) is tuple else value
    return words, values


def _options(*sections: type) -> dict[str, tuple[str, Field, str]]:
    """By every name of an option: the setting's full name, the setting, and what the bare option
    means, if anything.
    """
    full = {name: each for section in sections for name, each in settings_of(section).items()}
    keys = Counter(each.name for each in full.values())
    options = {}
    for name, this in full.items():
        short = [this.name] if keys[this.name] == 1 else []
        for each in (name, *short, *this.metadata["aliases"]):
            switch = "false" if each.startswith("no-") else "true" if kind(this) is bool else ""
            options[each.replace("-", "_")] = (name, this, this.metadata["alone"] or switch)
    return options


def train_help() -> str:
    """What `python train.py --help` prints, made from the schema."""
    return TRAIN_USAGE + _help(Actions) + _help(Config) + NOTES


def sample_help() -> str:
    """What `python sample.py --help` prints, made from the schema."""
    return SAMPLE_USAGE + _help(SampleConfig) + NOTES


def _help(section: type, prefix: str = "") -> str:
    """The settings of a section, one below the other, and then the sections in it."""
    lines = ["", section.__doc__.splitlines()[0]]
    for each in fields(section):
        if each.metadata:
            also = "".join(f"; also --{alias}" for alias in each.metadata["aliases"])
            meaning = f"{each.metadata['meaning']}; {allowed(each)}{also}"
            name = f"  --{prefix}{each.name}{_default(each.default)} "
            lines.append(
                textwrap.fill(
                    meaning, 100, initial_indent=f"{name:<40}", subsequent_indent=" " * 40
                )
            )
    inner = (
        _help(each.type, f"{each.name}.") for each in fields(section) if is_dataclass(each.type)
    )
    return "\n".join(lines) + "\n" + "".join(inner)


def _default(value: object) -> str:
    if value is None or value is MISSING:
        return ""
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return "=" + (text.lower() if isinstance(value, bool) else text)
