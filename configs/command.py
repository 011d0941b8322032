"""The command lines of train.py and sample.py: config files, options and --help.

All of this is checked before torch is imported, which takes seconds: a mistake is reported at once.

A config file is a flat list of lines `key: value`, and `--key=value` on the command line overrides
it. argparse and YAML only collect strings. `parse_value` parses each by the type of its setting, so
both get the same answer, and YAML's guesses (`010`, `on`, `1:30`) play no part.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType

from common.console import prepare_console, print_text
from common.errors import ConfigError
from common.files import beside_code, holds_run, home_path, runs_near
from common.words import did_you_mean, quoted
from configs.fields import (
    Checked,
    describe_allowed,
    error_context,
    parse_escapes,
    parse_value,
    parts_of,
    setting,
    settings_of,
)
from configs.schema import Config, SampleConfig, flat_settings, suggest_setting, with_settings

TRAIN_USAGE = """\
python train.py CONFIG|RUN_FOLDER [--key=value ...]

  python train.py configs/shakespeare.yaml
  python train.py configs/mytext.yaml --sources=book.txt
  python train.py configs/shakespeare.yaml --max_iters=2000 --learning_rate=5e-4
  python train.py out/shakespeare                 # resume this run
  torchrun --nproc_per_node=2 train.py configs/shakespeare.yaml

In a config file, --key=value is a line `key: value`."""
SAMPLE_USAGE = """\
python sample.py --ckpt=FILE|FOLDER [--key=value ...]

  python sample.py --ckpt out/shakespeare --prompt "ROMEO:"
  python sample.py --ckpt out/shakespeare --num_samples=3 --temperature=0.6"""
NOTES = "--key value is --key=value, a dash in a name is an underscore, --compile is --compile=true"
# options that do not apply to `train.py RUN_FOLDER`
FOR_NEW_RUNS = ("print_config", "overwrite", "init_from", "new_characters", "minutes", "out_dir")
SETTINGS = settings_of(Config)
MAX_FAULTS = 5  # wrong settings of a file that are reported at once


@dataclass(frozen=True)
class StartOptions(Checked):
    """The options that start or resume a run, and are not for config files."""

    print_config: bool = setting(False, "print the settings of a new run as YAML and exit")
    resume: bool = setting(False, "resume the run in out_dir, or start one if there is none")
    overwrite: bool = setting(False, "replace the run in out_dir, if there is one")
    init_from: str | None = setting(None, "checkpoint to start from: weights and vocabulary")
    new_characters: str = setting("refuse", "with --init_from, new characters", ("refuse", "add"))
    minutes: float | None = setting(None, "choose max_iters for this many minutes", more_than=0)


@dataclass(frozen=True)
class Command(StartOptions):
    """A command line of train.py: a config file or a run folder, and the options.

    A new run takes its settings from `settings_in_file`, a resumed run from its checkpoint, and
    `options` override both. Paths are as they were typed: `~` is not expanded.
    """

    config_file: str = ""
    resumed_folder: str = ""
    settings_in_file: Mapping[str, object] = dataclasses.field(default_factory=dict)
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    began: float = dataclasses.field(default_factory=time.monotonic)  # before torch is imported

    def __post_init__(self):
        super().__post_init__()
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other; give one of them")
        if "max_iters" in self.options and self.minutes:
            raise ConfigError("--minutes and --max_iters contradict each other; give one of them")
        if self.new_characters == "add" and not self.init_from:
            raise ConfigError("--new_characters only applies together with --init_from")

    @property
    def resumes(self) -> bool:
        """True if the run in the folder goes on, if there is one."""
        return self.resume or self.resumed_folder != ""

    @property
    def out_dir(self) -> str:
        """The run folder; `auto` means out/NAME for NAME.yaml."""
        out_dir = self.options.get("out_dir", self.settings_in_file.get("out_dir", "auto"))
        named_after_config = f"out/{Path(self.config_file).stem}"
        return self.resumed_folder or (named_after_config if out_dir == "auto" else out_dir)

    @property
    def folder(self) -> Path:
        """The path of the run folder, in which ~ is the home folder."""
        return home_path(self.out_dir)

    def new_settings(self, architecture: Mapping[str, object] = MappingProxyType({})) -> Config:
        """Return the settings of a new run; raise ConfigError if they contradict.

        `architecture` has the settings that a run with --init_from takes from its parent.
        """
        settings = self.settings_in_file | self.options | architecture | {"out_dir": self.out_dir}
        with error_context(f"{self.config_file}{' and the options' if self.options else ''}"):
            return with_settings(Config(), settings)

    def resumed_settings(self, saved: Config) -> Config:
        """Return the settings of a resumed run: those of its checkpoint, changed by the options."""
        options = self.options | {"out_dir": self.out_dir}
        if self.minutes:  # --minutes chose it when the run began
            options.pop("eval_interval", None)
        with error_context("the settings of the checkpoint and the options"):
            return with_settings(saved, options)


# ----------------------------------------------------------------------------------------- train.py


def parse_train(argv: Sequence[str] | None = None) -> Command:
    """Parse and check the arguments of train.py: a config file or run folder, and options.

    `argv` defaults to the arguments of the process. Exits after --help and --print_config. From
    here on, an error is printed as one line and ends in its exit code.
    """
    prepare_console()
    words, options = parse_options(argv, TRAIN_USAGE, StartOptions, Config)
    if len(words) != 1:
        raise ConfigError(
            "train.py takes one config file or run folder, such as configs/shakespeare.yaml, "
            f"but is given {quoted(tuple(words)) if words else 'none'}; an option is --key=value; "
            "see python train.py --help"
        )

    if holds_run(home_path(words[0])):
        given = {"resumed_folder": words[0]}
        if wrong := [name for name in FOR_NEW_RUNS if name in options]:
            raise ConfigError(
                f"--{wrong[0]} does not apply to a run folder: a run keeps its place and its "
                "length (but see --max_iters); a config file starts a new run"
            )
    else:
        given = {"config_file": words[0], "settings_in_file": read_config(words[0])}
    given |= {name: options.pop(name) for name in settings_of(StartOptions) if name in options}
    command = Command(options=options, **given)

    # find mistakes now, unless a checkpoint has some of the settings
    is_resumed = command.resumes and holds_run(command.folder)
    if command.print_config or not (is_resumed or command.init_from):
        settings = command.new_settings()
    if command.print_config:
        print_text(to_yaml(settings))
        raise SystemExit(0)
    return command


# ---------------------------------------------------------------------------------------- sample.py


def parse_sample_options(argv: Sequence[str] | None) -> SampleConfig:
    """Parse and check the arguments of sample.py; `argv` and errors are as in `parse_train`."""
    prepare_console()
    words, values = parse_options(argv, SAMPLE_USAGE, SampleConfig)
    if words:
        raise ConfigError(
            f"unexpected argument {quoted(words[0])}; a checkpoint is given as --ckpt=PATH, "
            'a prompt as --prompt="TEXT"; see python sample.py --help'
        )
    if not values.get("ckpt"):
        raise ConfigError("--ckpt is missing; write --ckpt=PATH: a run folder or checkpoint file")
    # stop strings have escapes, as the prompt has: --stop="\n\n"
    values["stop"] = tuple(map(parse_escapes, values.get("stop", ())))
    return SampleConfig(**values)


# ------------------------------------------------------------------------------------------ options


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors."""

    def error(self, message: str):
        raise ConfigError(f"{message}; write --key=VALUE, also for a value that begins with a dash")


def parse_options(
    argv: Sequence[str] | None, usage: str, *sections: type
) -> tuple[list[str], dict[str, object]]:
    """Return the arguments that are not options, and the values of the options by name.

    If an option is repeated, the last one wins; a list option collects its values. With --help,
    prints the help and exits.
    """
    settings = {name: field for section in sections for name, field in settings_of(section).items()}
    flags = {f"--{name}" for name, field in settings.items() if isinstance(field.default, bool)}
    parsed, rest = _option_parser(usage, sections).parse_known_args(_spell_options(argv, flags))
    texts = vars(parsed)
    words = texts.pop("words", []) + rest
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0]
            hint = suggest_setting(option.lstrip("-"), settings, "--")
            raise ConfigError(f"unknown option {quoted(option)}; {hint}")
    try:
        return words, {name: parse_value(settings[name], text) for name, text in texts.items()}
    except ConfigError as error:  # begins with the name of the setting
        raise ConfigError(f"--{error}") from None


def _option_parser(usage: str, sections: Sequence[type]) -> Parser:
    """Return a parser that collects the texts of the options by name."""
    parser = Parser(
        usage=usage,
        epilog=NOTES,
        formatter_class=partial(argparse.HelpFormatter, width=100, max_help_position=28),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    for part in (part for section in sections for part in parts_of(section)):
        group = parser.add_argument_group(part.__doc__.removesuffix("."))
        for field in (field for field in fields(part) if field.metadata):
            words = [field.metadata["meaning"]]
            if field.metadata["choices"] or field.metadata["limits"]:
                words.append(describe_allowed(field))
            if field.default not in (None, "", ()):
                default = field.default  # a float with few digits
                default = f"{default:g}" if isinstance(default, float) else quoted(default)
                words.append(f"default {default}")
            group.add_argument(
                f"--{field.name}",
                action="append" if isinstance(field.default, tuple) else "store",
                metavar="" if isinstance(field.default, bool) else "VALUE",
                help="; ".join(words),
            )
    return parser


def _spell_options(argv: Sequence[str] | None, flags: set[str]) -> list[str]:
    """Write options as argparse knows them: --n-layer=3 as --n_layer=3, --compile with =true."""
    words = []
    for word in sys.argv[1:] if argv is None else argv:
        name, equals, value = word.partition("=")
        if word.lower() in ("true", "false") and words and words[-1] in flags:
            words[-1] += f"={word}"
        elif name.startswith("--"):
            words.append("--" + name[2:].replace("-", "_") + equals + value)
        else:
            words.append(word)
    # with nargs="?", argparse would take the config file after --compile for the value of --compile
    return [f"{word}=true" if word in flags else word for word in words]


# ------------------------------------------------------------------------------------- config files


def read_config(path: str) -> dict[str, object]:
    """Return the checked settings in a config file by name.

    Raises ConfigError with a line for each of the first MAX_FAULTS wrong settings.
    """
    with error_context(path):
        settings, lines, faults = {}, {}, []
        for key, line, value in _entries(_read(path)):
            try:
                if key in lines:
                    raise ConfigError(f"duplicate key {quoted(key)}, as in line {lines[key]}")
                if key not in SETTINGS:
                    raise ConfigError(
                        f"unknown key {quoted(key)}; {suggest_setting(key, SETTINGS)}"
                    )
                settings[key] = parse_value(SETTINGS[key], value)
            except ConfigError as error:
                faults.append(f"line {line}: {error}")
            lines[key] = line
        if faults:
            raise ConfigError(*faults[:MAX_FAULTS])
        return settings


def _entries(text: str) -> Iterator[tuple[str, int, object]]:
    """Yield the key, the line and the value of each setting in a YAML text.

    A value is a string or a list; no object is constructed, whatever the tags and aliases.
    """
    import yaml  # here, so that a missing package is reported in one line

    form = "each setting is a line `key: value`, not indented, with a space after the colon"
    try:
        root = yaml.compose(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise ConfigError(f"line {line}: not YAML ({error.problem}); {form}") from None
    except Exception as error:  # others too, such as an OverflowError for "\Uffffffff"
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}; {form}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"has no settings; {form}")

    for key_node, node in root.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"  # `? [a]` is YAML
        line = key_node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"line {line}: settings are a flat list now: write n_layer: 3 without the section "
                f"{quoted(key)}"
            )
        is_list = isinstance(node, yaml.SequenceNode)
        yield key, line, [item.value for item in node.value] if is_list else node.value


def to_yaml(config: Config) -> str:
    """Return the complete settings as YAML that `read_config` reads back."""
    import yaml

    dump = partial(yaml.safe_dump, flat_settings(config), sort_keys=False, width=100)
    text = dump(allow_unicode=True)
    # non-ASCII characters as they are, unless one is invisible
    return text if text.replace("\n", "").isprintable() else dump(allow_unicode=False)


def _read(path: str) -> str:
    """Return the text of a config file; a relative path may also start at the code's folder."""
    file = beside_code(home_path(path))
    if file.suffix == ".safetensors":
        raise ConfigError(f"is a checkpoint; name its folder to resume the run: {file.parent}")
    try:
        if not file.is_dir():
            return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass  # a typo, or the name of a recipe without .yaml
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}; save it as UTF-8") from None
    names = _startable(file if file.is_dir() else beside_code(Path("configs")), file)
    hint = did_you_mean(file.name, names, f"allowed: {', '.join(names.values())}")
    raise ConfigError(f"is no config and no run folder; {hint}")


def _startable(configs: Path, path: Path) -> dict[str, str]:
    """Return the paths of the configs in a folder, and of the runs near a wrong path, by name."""
    paths = {config.name: str(config) for config in sorted(configs.glob("*.yaml"))}
    paths |= {Path(run).name: run for run in runs_near(path)}
    return paths or {"shakespeare.yaml": "configs/shakespeare.yaml"}
