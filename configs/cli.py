"""The command lines of train.py and sample.py, derived from the dataclasses of the settings.

Every setting is an option: `--model.n_layer=6` or `--model.n_layer 6`, and `--n_layer=6` if no
other section has that key. A dash equals an underscore; abbreviations are not accepted.

argparse would not do: `--resume[=PATH]` must not consume the next argument, and an error must be
one line that names the nearest option.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path

from common.console import path_word, script, shell_command
from common.errors import ConfigError
from configs.fields import (
    Checked,
    RawValue,
    brief,
    describe_allowed,
    error_context,
    is_valid_text,
    kind,
    parse_value,
    setting,
    settings_of,
)
from configs.schema import Config, SampleConfig, check_memory, from_dict, suggest_setting

TRAIN_USAGE = """\
usage: python train.py CONFIG [--section.key=value ...]

  python train.py configs/shakespeare.yaml
  python train.py configs/mytext.yaml --data.sources=book.txt
  python train.py configs/shakespeare.yaml --max_iters=2000 --learning_rate=5e-4
  python train.py configs/shakespeare.yaml --resume
  torchrun --nproc_per_node=2 train.py configs/shakespeare.yaml --train.log=scalars

torchrun rejects --log as ambiguous, because its own options begin with --log: write --train.log.
"""
SAMPLE_USAGE = """\
usage: python sample.py --ckpt=FILE|FOLDER [--key=value ...]

  python sample.py --ckpt out/shakespeare --prompt "ROMEO:"
  python sample.py --ckpt out/seed-1 --ckpt out/seed-2 --score book.txt
  python sample.py --ckpt out/shakespeare --num-samples=3 --temperature=0.6 --seed=7
"""
# options that a resume must not repeat
STARTING_OPTIONS = ("resume", "overwrite", "init_from", "new_characters", "allow_data_change")
MIN_EVAL_INTERVAL = 10  # steps; not scaled below this, as an evaluation costs several steps
NOTES = """
A key needs its section only if another section has the same key. --key value is the same as
--key=value, and a dash is the same as an underscore. A setting that is true or false needs no
value: --key is --key=true. An option may be given only once, except one that takes a list: its
values are collected.
[0, 1) means at least 0 and below 1.
"""


@dataclass(frozen=True)
class CommandLineOptions(Checked):
    """Options that are only for the command line, not for config files."""

    print_config: bool = setting(False, "print the complete settings as YAML and exit")
    resume: str | None = setting(
        None,
        "resume from the last checkpoint in out_dir, or from --resume=PATH; if out_dir holds no "
        "run yet: start one, or report an error if --out_dir is given, as it may be misspelled",
        bare_value="auto",
    )
    allow_data_change: bool = setting(False, "with --resume: accept that the text has changed")
    overwrite: bool = setting(False, "replace the run in out_dir, if there is one")
    init_from: str | None = setting(
        None, "checkpoint to take the initial weights and the vocabulary from"
    )
    new_characters: str = setting(
        "refuse",
        "with --init_from: what to do with characters that the checkpoint's vocabulary lacks",
        choices=("refuse", "add"),
    )
    time_limit: float | None = setting(None, "minutes after which to save and stop", "(0, 1e6]")
    minutes: float | None = setting(
        None,
        "minutes that the run should take: time some steps and an evaluation, then choose "
        "max_iters, and eval_interval so that evaluations take at most a tenth of the time",
        "(0, 1e6]",
    )

    def __post_init__(self):
        super().__post_init__()
        for other in ("overwrite", "init_from"):
            if self.resume and getattr(self, other):
                raise ConfigError(f"--resume and --{other} contradict each other; give one of them")
        if self.minutes and self.time_limit:
            raise ConfigError(
                "--minutes and --time_limit contradict each other; give one of them: --minutes "
                "fits the schedule to the time, --time_limit cuts it off"
            )
        if self.allow_data_change and not self.resume:
            raise ConfigError("--allow_data_change only applies together with --resume")
        if self.new_characters == "add" and not self.init_from:
            raise ConfigError("--new_characters only applies together with --init_from")


@dataclass(frozen=True)
class Command(CommandLineOptions):
    """A checked command line of train.py, with the complete settings of the run."""

    config_file: str = ""
    config: Config = field(default_factory=Config)
    out_dir_given: bool = False  # by an option, not by the file or by default
    arguments: tuple[str, ...] = ()
    given: Mapping[str, list[str]] = field(default_factory=dict)  # options as typed, by full name
    scaling_note: str | None = None  # which settings were scaled with max_iters

    @property
    def out_dir(self) -> str:
        """The folder of the run; auto is out/<name of the config file>."""
        if self.config.out_dir == "auto":
            return f"out/{Path(self.config_file).stem}"
        return self.config.out_dir

    def repeat_command(
        self, launcher: list[str], *, resume: bool, changes: Mapping[str, object] | None = None
    ) -> str:
        """Return the shell command that starts the run again, or that resumes it.

        It repeats the options of this start, with those in `changes` replaced. A resume leaves out
        STARTING_OPTIONS, and another max_iters leaves out --minutes.
        """
        changes = changes or {}
        left_out = set(changes)
        if resume:
            left_out.update(STARTING_OPTIONS)
        if "max_iters" in changes:
            left_out.add("minutes")
        words = [path_word(self.config_file)]
        for name, options in self.given.items():
            if name.rpartition(".")[2] not in left_out:
                words += options
        if resume:
            words.append("--resume")
        words += [f"--{name}={value}" for name, value in changes.items()]
        return shell_command([*launcher, script("train.py"), *words])


def load(
    argv: list[str],
    fitted: Mapping[str, object] | None = None,
    max_evaluations: int | None = None,
) -> Command:
    """Parse the arguments of train.py: a config file and the options that override it.

    `fitted` has the settings that --minutes chooses, by full name. They override the file, but not
    the options. If max_iters is not that of the file, the settings in the file that count
    iterations are scaled with it. With `max_evaluations`, the file's eval_interval is lengthened
    until there are at most so many evaluations.
    """
    from configs.strict_yaml import read_config  # not at the top: PyYAML may not be installed

    words, values, given = parse_arguments(argv, CommandLineOptions, Config)
    if "minutes" in values and "train.max_iters" in values:
        raise ConfigError("--minutes and --max_iters contradict each other; give one of them")
    values = {**(fitted or {}), **values}
    if len(words) != 1:
        given = brief(tuple(words)) if words else "none"
        raise ConfigError(
            "train.py takes one config file, such as configs/shakespeare.yaml, "
            f"but is given {given}; "
            "an option begins with -- and has its value after =, as in --resume=PATH; "
            "see python train.py --help"
        )
    own = {name: values.pop(name) for name in settings_of(CommandLineOptions) if name in values}
    written = read_config(words[0])
    scaled = _scaled_iterations(written, values, max_evaluations)
    nested = {}
    for name, value in (written | scaled | values).items():
        section, _, key = name.rpartition(".")
        target = nested.setdefault(section, {}) if section else nested
        target[key] = value
    with error_context(words[0] + " and the options" * bool(values)):
        config = from_dict(nested)
        check_memory(config.model)
    scaling_note = None
    if scaled:
        iterations = [f"{name.partition('.')[2]} {value:,}" for name, value in scaled.items()]
        scaling_note = (
            f"max_iters is {config.train.max_iters:,}; scaled with it: {', '.join(iterations)}"
        )
    return Command(
        config_file=words[0],
        config=config,
        out_dir_given=values.get("out_dir", "auto") != "auto",
        arguments=tuple(argv),
        given=given,
        scaling_note=scaling_note,
        **own,
    )


def _scaled_iterations(
    written: dict[str, object], values: dict[str, object], max_evaluations: int | None
) -> dict[str, int]:
    """Scale the file's settings that count iterations to a max_iters from the options.

    Return those that change. They are scaled in proportion, but eval_interval is at least
    MIN_EVAL_INTERVAL, and long enough for at most `max_evaluations`. Where this limit lengthens it,
    save_interval: auto becomes the interval without the limit. Settings that the options set, and
    those that are `auto`, are not scaled.
    """
    settings = settings_of(Config)
    file = {name: written.get(name, each.default) for name, each in settings.items()}
    before, after = file["train.max_iters"], values.get("train.max_iters", file["train.max_iters"])
    scaled = {}
    for name in ("train.warmup_iters", "train.cooldown_iters"):
        if name not in values and file[name] != "auto":
            scaled[name] = file[name] * after // before
    if "train.eval_interval" not in values:
        # rounded up: rounding down could add an evaluation a few steps after the last interval
        interval = math.ceil(file["train.eval_interval"] * after / before)
        interval = max(interval, min(MIN_EVAL_INTERVAL, file["train.eval_interval"], after))
        shortest = math.ceil(after / max_evaluations) if max_evaluations else 1
        scaled["train.eval_interval"] = max(interval, shortest)
        saves_with_evaluations = (file | values)["train.save_interval"] == "auto"
        if shortest > interval and saves_with_evaluations:
            scaled["train.save_interval"] = interval
    return {name: value for name, value in scaled.items() if value != file[name]}


def load_sample(argv: list[str]) -> SampleConfig:
    """Parse the arguments of sample.py."""
    words, values, _ = parse_arguments(argv, SampleConfig)
    if words:
        raise ConfigError(
            f"unexpected argument {brief(words[0])}; a checkpoint is given as --ckpt=PATH, "
            'a prompt as --prompt="TEXT"; see python sample.py --help'
        )
    return from_dict(values, SampleConfig)


def load_conversion(argv: list[str], section: type, source: str) -> tuple[str, Checked]:
    """Parse the arguments of an import or export: one file or folder, and options of `section`.

    `source` describes the file or folder, for messages.
    """
    words, values, _ = parse_arguments(argv, section)
    if len(words) != 1:
        given = brief(tuple(words)) if words else "none"
        raise ConfigError(f"give one {source}; given: {given}; --help shows an example")
    return words[0], from_dict(values, section)


def parse_arguments(
    argv: list[str], *sections: type
) -> tuple[list[str], dict[str, object], dict[str, list[str]]]:
    """Return the arguments that are not options, and the values of the options by full name.

    Also return the options as they were typed, each as one word: `--key` or `--key=value`.
    """
    options = _options(*sections)
    words, values, given = [], {}, {}
    for word in argv:
        if not is_valid_text(word):
            raise ConfigError(f"argument {brief(word)} is not UTF-8 text; write it in UTF-8")
    rest = iter(argv)
    for word in rest:
        if not word.startswith("-"):
            words.append(word)
            continue
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if key not in options:
            known = {name: f"--{name}" for name in (*options, "help")}
            hint = suggest_setting(key, known, "--help lists all")
            raise ConfigError(f"unknown option {brief(option)}; {hint}")
        name, each, bare_value = options[key]
        if name in given and kind(each) is not tuple:
            both = f"{brief(given[name][0])} and {brief(word)}"
            raise ConfigError(f"duplicate option {brief(name)} ({both}); keep one of them")
        with error_context(option):
            if not equals:
                text = bare_value or next(rest, "--")
                if text.startswith("--"):
                    raise ConfigError(
                        f"has no value; it must be {describe_allowed(each)}; write {option}=VALUE"
                    )
            elif key.startswith("no_"):
                raise ConfigError("takes no value")
            value = _parse_option(each, text)
        values[name] = values.get(name, ()) + value if kind(each) is tuple else value
        given.setdefault(name, []).append(word if bare_value else f"{option}={text}")
    return words, values, given


def _parse_option(each: Field, text: str) -> object:
    """Parse the value of an option; a list may be written as in YAML, `[a, b]`."""
    if each.metadata["repeatable"] and text:
        return (text,)
    if kind(each) is tuple and text.startswith("["):
        from configs.strict_yaml import parse

        return parse_value(each, parse(text))
    return parse_value(each, RawValue(text, plain=kind(each) is not str))


def _options(*sections: type) -> dict[str, tuple[str, Field, str]]:
    """Return, for every name of an option: full name, setting, and value if none is given."""
    settings = {name: each for section in sections for name, each in settings_of(section).items()}
    keys = Counter(each.name for each in settings.values())
    options = {}
    for name, each in settings.items():
        short = [each.name] if keys[each.name] == 1 else []
        for alias in (name, *short, *each.metadata["aliases"]):
            bare_value = each.metadata["bare_value"]
            if alias.startswith("no-"):
                bare_value = "false"
            elif kind(each) is bool:
                bare_value = "true"
            options[alias.replace("-", "_")] = (name, each, bare_value)
    return options


def train_help() -> str:
    """Return what `python train.py --help` prints."""
    return command_help(TRAIN_USAGE, CommandLineOptions, Config)


def sample_help() -> str:
    """Return what `python sample.py --help` prints."""
    return command_help(SAMPLE_USAGE, SampleConfig)


def command_help(usage: str, *sections: type) -> str:
    """Return what a command with the settings of these sections prints for --help."""
    return usage + "".join(map(_help, sections)) + NOTES


def _help(section: type, prefix: str = "") -> str:
    """Describe the settings of a section, then the sections in it."""
    lines = ["", section.__doc__.splitlines()[0]]
    for each in fields(section):
        if each.metadata:
            also = "".join(f"; also --{alias}" for alias in each.metadata["aliases"])
            meaning = f"{each.metadata['meaning']}; {describe_allowed(each)}{also}"
            option = f"  --{prefix}{each.name}{_default(each.default)} "
            indent = " " * 40
            lines.append(
                textwrap.fill(
                    meaning, 100, initial_indent=f"{option:<40}", subsequent_indent=indent
                )
            )
    inner = [
        _help(each.type, f"{each.name}.") for each in fields(section) if is_dataclass(each.type)
    ]
    return "\n".join(lines) + "\n" + "".join(inner)


def _default(value: object) -> str:
    if value is None or value is MISSING:
        return ""
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return "=" + (text.lower() if isinstance(value, bool) else text)
