"""The command lines of train.py and sample.py: config files, options and --help.

Importing torch takes seconds, so all of this is checked before: a mistake is reported at once.

Config files are YAML, but each value is read as a string and parsed by the type of its setting.
YAML's guesses (`010`, `on`, `1:30`) play no part.
"""

import dataclasses
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.console import (
    executable,
    path_argument,
    prepare_console,
    print_text,
    script_path,
    shell_command,
)
from common.errors import ConfigError, did_you_mean
from common.files import beside_code
from configs.fields import (
    Checked,
    brief,
    describe_allowed,
    describe_limits,
    error_context,
    parse_value,
    setting,
    settings_of,
    unescape,
    value_type,
)
from configs.schema import Config, SampleConfig, from_dict, suggest_setting

if TYPE_CHECKING:
    import yaml  # the functions import it, so that a missing package is reported in one line

TRAIN_USAGE = """\
usage: python train.py CONFIG [--section.key=value ...]

  python train.py configs/shakespeare.yaml
  python train.py configs/mytext.yaml --data.sources=book.txt
  python train.py configs/shakespeare.yaml --max_iters=2000 --learning_rate=5e-4
  python train.py configs/shakespeare.yaml --resume
  torchrun --nproc_per_node=2 train.py configs/shakespeare.yaml

torchrun rejects --log as ambiguous: write --train.log.
In a config file, indent the settings of data, model and train below that word.
"""
SAMPLE_USAGE = """\
usage: python sample.py --ckpt=FILE|FOLDER [--key=value ...]

  python sample.py --ckpt out/shakespeare --prompt "ROMEO:"
  python sample.py --ckpt out/shakespeare --num_samples=3 --temperature=0.6
"""
NOTES = """
The value after = is the default. --key value is --key=value, a dash is an
underscore, and --key alone is --key=true.
"""
SETTINGS = settings_of(Config)  # by full name
SECTION_NAMES = {name.partition(".")[0] for name in SETTINGS if "." in name}
MAX_FAULTS = 5  # wrong settings of a file that are reported at once


@dataclass(frozen=True)
class CommandLineOptions(Checked):
    """Options that are only for the command line, not for config files."""

    print_config: bool = setting(False, "print the settings of a new run as YAML and exit")
    resume: str | None = setting(  # "auto": given without a path
        None, "resume the run in out_dir, or the one at --resume=PATH", bare_value="auto"
    )
    allow_data_change: bool = setting(False, "with --resume: accept that the text has changed")
    overwrite: bool = setting(False, "replace the run in out_dir, if there is one")
    init_from: str | None = setting(None, "checkpoint to start from: weights and vocabulary")
    new_characters: str = setting("refuse", "with --init_from, new characters", ("refuse", "add"))
    minutes: float | None = setting(None, "choose max_iters for this many minutes", more_than=0)

    def __post_init__(self):
        super().__post_init__()
        # options that contradict each other, or need another one
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other; give one of them")
        if self.allow_data_change and not self.resume:
            raise ConfigError("--allow_data_change only applies together with --resume")
        if self.new_characters == "add" and not self.init_from:
            raise ConfigError("--new_characters only applies together with --init_from")


@dataclass(frozen=True)
class Command(CommandLineOptions):
    """A command line of train.py: how to start, and the settings in the file and in the options.

    A new run takes its settings from `file`, a resumed run from its checkpoint; `options` override
    both. Both mappings have full names as keys.
    """

    config_file: str = ""
    file: Mapping[str, object] = dataclasses.field(default_factory=dict)
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    started: float = dataclasses.field(default_factory=time.monotonic)  # before torch is imported

    @property
    def out_dir(self) -> str:
        """The run folder; `auto` means out/NAME for NAME.yaml."""
        out_dir = self.options.get("out_dir", self.file.get("out_dir", "auto"))
        return f"out/{Path(self.config_file).stem}" if out_dir == "auto" else out_dir

    def file_settings(self) -> Config:
        """Return the settings of the file alone; raise ConfigError if they contradict."""
        with error_context(self.config_file):
            return _override(Config(), self.file | {"out_dir": self.out_dir})

    def new_settings(self) -> Config:
        """Return the settings of a new run; raise ConfigError if they contradict."""
        where = f"{self.config_file} and the options" if self.options else self.config_file
        with error_context(where):
            return _override(Config(), self.file | self.options | {"out_dir": self.out_dir})

    def resumed_settings(self, saved: Config) -> Config:
        """Return the settings of a resumed run: those of its checkpoint, changed by the options."""
        with error_context("the settings of the checkpoint and the options"):
            return _override(saved, self.options | {"out_dir": self.out_dir})

    def resume_command(self, *more: str) -> str:
        """Return the shell command that resumes this run, whatever options started it."""
        # only its folder: the settings are in the checkpoint
        words = [*_launcher(), script_path("train.py"), path_argument(self.config_file)]
        if "out_dir" in self.options:
            words.append(f"--out_dir={self.out_dir}")
        return shell_command([*words, "--resume", *more])


def _launcher() -> list[str]:
    """Return the words of the command before train.py: python, or torchrun if it started us."""
    if "RANK" not in os.environ:  # as in World.from_environment
        return [executable("python")]
    processes, machines = (
        int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
    nodes = [f"--nnodes={machines}"] if machines > 1 else []
    return [executable("torchrun"), *nodes, f"--nproc_per_node={processes}"]


def _override(config: Config, settings: Mapping[str, object]) -> Config:
    """Return a config in which some settings, given by full name, have other values."""
    # build it anew, so that the combination is checked too
    nested = asdict(config)
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        target = nested[section] if section else nested
        target[key] = value
    return from_dict(nested)


# ----------------------------------------------------------------------------------------- train.py


def parse_train(argv: Sequence[str] | None = None) -> Command:
    """Parse and check the arguments of train.py: a config file and the options that override it.

    `argv` defaults to the arguments of the process. Exits after --help and --print_config. From
    here on, an error is printed as one line and ends in its exit code.
    """
    prepare_console()
    words, options = parse_arguments(argv, TRAIN_USAGE, CommandLineOptions, Config)
    if "minutes" in options and "train.max_iters" in options:
        raise ConfigError("--minutes and --max_iters contradict each other; give one of them")

    # exactly one argument is not an option: the config file
    if len(words) != 1:
        config_words = brief(tuple(words)) if words else "none"
        raise ConfigError(
            "train.py takes one config file, such as configs/shakespeare.yaml, "
            f"but is given {config_words}; "
            "an option begins with -- and has its value after =, as in --resume=PATH; "
            "see python train.py --help"
        )

    # some options say how to start, the others are settings
    names = options.keys() & settings_of(CommandLineOptions).keys()
    starting = {name: options.pop(name) for name in names}
    command = Command(config_file=words[0], file=read_config(words[0]), options=options, **starting)

    if command.print_config:
        print_text(to_yaml(command.new_settings()))
        raise SystemExit(0)
    # find mistakes now; a resumed run takes its settings from the checkpoint
    if not command.resume:
        command.new_settings()
    return command


# ---------------------------------------------------------------------------------------- sample.py


def parse_sample_options(argv: Sequence[str] | None) -> SampleConfig:
    """Parse the options of sample.py without reading any file."""
    words, values = parse_arguments(argv, SAMPLE_USAGE, SampleConfig)
    if words:
        raise ConfigError(
            f"unexpected argument {brief(words[0])}; a checkpoint is given as --ckpt=PATH, "
            'a prompt as --prompt="TEXT"; see python sample.py --help'
        )
    if not values.get("ckpt"):
        raise ConfigError("--ckpt is missing; write --ckpt=PATH: a run folder or checkpoint file")
    # stop strings have escapes, as the prompt: --stop='\n\n'
    values["stop"] = tuple(map(unescape, values.get("stop", ())))
    return from_dict(values, SampleConfig)


# ------------------------------------------------------------------------------------------ options


def parse_arguments(
    argv: Sequence[str] | None, usage: str, *sections: type
) -> tuple[list[str], dict[str, object]]:
    """Return the arguments that are not options, and the values of the options by full name.

    If an option is repeated, the last one wins; a list option collects its values. With --help,
    prints the help and exits.

    Why not argparse: `--resume[=PATH]` must not take the next argument, and an error must be one
    line that names the nearest option.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_text(usage + "".join(map(_help, sections)) + NOTES)
        raise SystemExit(0)

    # word by word; an option without = takes the next word as its value
    options = options_of(*sections)
    words, values, rest = [], {}, iter(argv)
    for word in rest:
        if not word.startswith("-"):
            words.append(word)
            continue

        # --n_layer=6 or --model.n_layer 6; a dash in a name is an underscore
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if key not in options:
            known = {name: f"--{name}" for name in (*options, "help")}
            hint = suggest_setting(key, known, "--help lists all")
            raise ConfigError(f"unknown option {brief(option)}; {hint}")

        # its value; a few options have a default if they are given alone
        name, field = options[key]
        with error_context(option):
            if not equals:
                text = _bare_value(field) or next(rest, None)
                if text is None or text.startswith("--"):
                    raise ConfigError(
                        f"has no value; it must be {describe_allowed(field)}; write {option}=VALUE"
                    )
            value = parse_value(field, text)
        values[name] = values.get(name, ()) + value if value_type(field) is tuple else value
    return words, values


def options_of(*sections: type) -> dict[str, tuple[str, Field]]:
    """Map the names of every option to its full name and its setting.

    An option has two names: `model.n_layer` and `n_layer`.
    """
    options = {}
    for section in sections:
        # all short names differ
        for name, field in settings_of(section).items():
            options[name] = options[field.name] = (name, field)
    return options


def _bare_value(field: Field) -> str:
    """Return the value of an option that is given without one, or "" if it needs one."""
    return "true" if value_type(field) is bool else field.metadata["bare_value"]


def _help(section: type, prefix: str = "") -> str:
    """Describe the settings of a section, then the sections in it."""
    # a title, then the name, default and meaning of each setting
    lines = ["", prefix + section.__doc__.splitlines()[0]]
    for field in fields(section):
        if field.metadata:
            option = f"  --{field.name}{_default(field.default)} "
            meaning, indent = field.metadata["meaning"] + _range(field), " " * 28
            lines += textwrap.wrap(
                meaning, 80, initial_indent=f"{option:28}", subsequent_indent=indent
            )

    # the sections: data, model and train
    inner = [
        _help(field.type, f"{field.name}: ")
        for field in fields(section)
        if is_dataclass(field.type)
    ]
    return "\n".join(lines) + "\n" + "".join(inner)


def _default(value: object) -> str:
    if value in (None, "", ()):
        return ""
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return "=" + (text.lower() if isinstance(value, bool) else text)


def _range(field: Field) -> str:
    """Return the choices of a name, or the limits of a number, to print after the meaning."""
    choices, limits = field.metadata["choices"], describe_limits(field)
    if value_type(field) is str and choices:
        return f": {', '.join(choices)}"
    return f"; {limits}" if limits else ""


# ------------------------------------------------------------------------------------- config files


def read_config(path: str) -> dict[str, object]:
    """Return the checked settings in a config file by full name: `model.n_layer`.

    Raises ConfigError with a line for each of the first MAX_FAULTS wrong settings.
    """
    with error_context(path):
        settings, faults = {}, []
        # continue after a fault, to report several at once
        for section, key, value, line in _entries(_compose(_read(path))):
            try:
                with error_context(f"line {line}"):
                    settings[section + key] = _parse_setting(section, key, value)
            except ConfigError as error:
                faults.append(str(error))
        if faults:
            raise ConfigError(*faults[:MAX_FAULTS])
        return settings


def to_yaml(config: Config) -> str:
    """Return the complete settings as YAML that `read_config` reads back."""
    import yaml

    options = {"sort_keys": False, "width": 100}
    text = yaml.safe_dump(asdict(config), allow_unicode=True, **options)
    # readable; but escape everything if a character is invisible
    if text.replace("\n", "").isprintable():
        return text
    return yaml.safe_dump(asdict(config), allow_unicode=False, **options)


def _read(path: str) -> str:
    """Return the text of a config file; a relative path may also start at the code's folder."""
    file = beside_code(Path(path))
    if file.is_dir():
        nearby = ", ".join(_configs_in(file))
        raise ConfigError(f"is a folder; give a config file, such as {nearby}")
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        # a typo, or the name of a recipe without .yaml
        names = {Path(name).stem: name for name in _configs_in(file.parent, Path("configs"))}
        hint = did_you_mean(file.stem, names, f"allowed: {', '.join(names.values())}")
        raise ConfigError(f"no such config; {hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}; save it as UTF-8") from None


def _configs_in(*folders: Path) -> list[str]:
    """Return the configs in the folders; if there are none, name the main recipe."""
    configs = [str(file) for folder in folders for file in sorted(folder.glob("*.yaml"))]
    return configs or ["configs/shakespeare.yaml"]


def _compose(text: str) -> "yaml.MappingNode":
    """Parse YAML into nodes, which have line numbers and strings; no values are constructed."""
    import yaml

    try:
        # nodes do not show anchors and aliases, so look for them in the events
        events = list(yaml.parse(text, Loader=yaml.SafeLoader))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"line {line}: not YAML ({problem}); {_hint(text)}") from None
    except Exception as error:  # PyYAML raises others too, such as a ValueError for "\Uffffffff"
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}; {_hint(text)}") from None

    # tags construct objects, aliases repeat values: settings need neither
    for event in events:
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            line = event.start_mark.line + 1
            raise ConfigError(
                f"line {line}: tags, anchors and aliases are not supported; write the value out"
            )

    if root is None:
        raise ConfigError("is empty; give at least one setting")
    if root.id != "mapping":
        raise ConfigError(f"must be lines of key: value; {_hint(text)}")
    return root


def _hint(text: str) -> str:
    """Return advice on a text that is not YAML; often the space after a colon is missing."""
    match = re.search(r"^ *(\w+):[^\s/]", text, re.MULTILINE)
    if match:
        return f"write a space after {brief(match[1] + ':')}"
    return "check the indentation (spaces only), colons, quotes and brackets up to there"


def _entries(
    mapping: "yaml.MappingNode", section: str = ""
) -> Iterator[tuple[str, str, object, int]]:
    """Yield the section, such as `model.`, the key, the value and the line of each entry."""
    lines = {}
    for key_node, value_node in mapping.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        # PyYAML would silently take the last one
        if key in lines:
            raise ConfigError(
                f"line {line}: duplicate key {brief(key)}, as in line {lines[key]}; keep one"
            )
        lines[key] = line

        # a section, such as `model:`, with its settings indented below it
        if section + key in SECTION_NAMES and value_node.id == "mapping":
            yield from _entries(value_node, f"{key}.")
        else:
            yield section, key, _value(value_node), line


def _value(node: "yaml.Node") -> object:
    """Return a node as a string or a list; a mapping becomes {}, which no setting accepts."""
    if node.id == "sequence":
        return [_value(item) for item in node.value]
    return node.value if node.id == "scalar" else {}


def _parse_setting(section: str, key: str, value: object) -> object:
    """Parse an entry; raise ConfigError if there is no such setting, or its value is wrong."""
    name = section + key
    # a section with a value, such as `model: 5`
    if name in SECTION_NAMES:
        raise ConfigError(f"{name} must be a mapping of keys to values; indent them below it")
    if name not in SETTINGS or "." in key:
        # a typo, the wrong section, or a name from another project
        names = {name: name for name in SECTION_NAMES}
        for full_name in SETTINGS:
            parent, _, short_name = full_name.rpartition(".")
            names[short_name] = f"{short_name} below {parent}" if parent else short_name
        hint = suggest_setting(key, names, "python train.py --help lists all")
        raise ConfigError(f"unknown key {brief(key)}; {hint}")
    return parse_value(SETTINGS[name], value)
