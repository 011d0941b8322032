"""The command lines of train.py and sample.py: config files, options and --help.

Importing torch takes seconds, so all of this is checked before: a mistake is reported at once.

argparse and YAML only collect strings. `parse_value` parses each by the type of its setting, so an
option and a line of a file get the same answer, and YAML's guesses (`010`, `on`, `1:30`) play no
part.
"""

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass
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
    describe_limits,
    error_context,
    parse_value,
    setting,
    settings_of,
    unescape,
    value_type,
)
from configs.schema import Config, SampleConfig, from_dict, suggest_setting

TRAIN_USAGE = """\
python train.py CONFIG|RUN_FOLDER [--key=value ...]

  python train.py configs/shakespeare.yaml
  python train.py configs/mytext.yaml --data.sources=book.txt
  python train.py configs/shakespeare.yaml --max_iters=2000 --learning_rate=5e-4
  python train.py out/shakespeare                 # resume this run
  torchrun --nproc_per_node=2 train.py configs/shakespeare.yaml

In a config file, indent the settings of data, model and train below that word."""
SAMPLE_USAGE = """\
python sample.py --ckpt=FILE|FOLDER [--key=value ...]

  python sample.py --ckpt out/shakespeare --prompt "ROMEO:"
  python sample.py --ckpt out/shakespeare --num_samples=3 --temperature=0.6"""
NOTES = "--key value is --key=value, a dash in a name is an underscore, --compile is --compile=true"
# options that do not apply to `train.py RUN_FOLDER`, and what to do instead
NOT_FOR_A_RUN_FOLDER = {
    "print_config": "its settings are in the config.yaml in it",
    "overwrite": "give a config file to train a new run in its place",
    "init_from": "give a config file to start a new run from a checkpoint",
    "new_characters": "give a config file to start a new run from a checkpoint",
    "minutes": "the run keeps its length; change it with --max_iters",
    "out_dir": "a run stays in its folder; copy the folder to go on elsewhere",
}
SETTINGS = settings_of(Config)  # by full name
SECTION_NAMES = {name.partition(".")[0] for name in SETTINGS if "." in name}
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
    `options` override both. Both mappings have full names as keys. Paths are as they were typed:
    `~` is not expanded.
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
        if "train.max_iters" in self.options and self.minutes:
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
        where = f"{self.config_file} and the options" if self.options else self.config_file
        settings = self.settings_in_file | self.options | architecture
        with error_context(where):
            return _override(Config(), settings | {"out_dir": self.out_dir})

    def resumed_settings(self, saved: Config) -> Config:
        """Return the settings of a resumed run: those of its checkpoint, changed by the options."""
        options = self.options | {"out_dir": self.out_dir}
        if self.minutes:  # --minutes chose it when the run began
            options.pop("train.eval_interval", None)
        with error_context("the settings of the checkpoint and the options"):
            return _override(saved, options)


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
    """Parse and check the arguments of train.py: a config file or run folder, and options.

    `argv` defaults to the arguments of the process. Exits after --help and --print_config. From
    here on, an error is printed as one line and ends in its exit code.
    """
    prepare_console()
    words, options = parse_options(argv, TRAIN_USAGE, StartOptions, Config)
    if len(words) != 1:
        found = quoted(tuple(words)) if words else "none"
        raise ConfigError(
            "train.py takes one config file or run folder, such as configs/shakespeare.yaml, "
            f"but is given {found}; an option begins with -- and has its value after =; "
            "see python train.py --help"
        )

    if holds_run(home_path(words[0])):
        given = {"resumed_folder": words[0]}
        for name, advice in NOT_FOR_A_RUN_FOLDER.items():
            if name in options:
                raise ConfigError(f"--{name} does not apply to a run folder; {advice}")
    else:
        given = {"config_file": words[0], "settings_in_file": read_config(words[0])}

    names = options.keys() & settings_of(StartOptions).keys()
    given |= {name: options.pop(name) for name in names}
    command = Command(options=options, **given)

    if command.print_config:
        print_text(to_yaml(command.new_settings()))
        raise SystemExit(0)
    # find mistakes now, unless a checkpoint has some of the settings
    is_resumed = command.resumes and holds_run(command.folder)
    if not (is_resumed or command.init_from):
        command.new_settings()
    return command


# ---------------------------------------------------------------------------------------- sample.py


def parse_sample_options(argv: Sequence[str] | None) -> SampleConfig:
    """Parse and check the arguments of sample.py; `argv` and the end are those of `parse_train`."""
    prepare_console()
    words, values = parse_options(argv, SAMPLE_USAGE, SampleConfig)
    if words:
        raise ConfigError(
            f"unexpected argument {quoted(words[0])}; a checkpoint is given as --ckpt=PATH, "
            'a prompt as --prompt="TEXT"; see python sample.py --help'
        )
    if not values.get("ckpt"):
        raise ConfigError("--ckpt is missing; write --ckpt=PATH: a run folder or checkpoint file")
    # stop strings have escapes, as the prompt: --stop='\n\n'
    values["stop"] = tuple(map(unescape, values.get("stop", ())))
    return from_dict(values, SampleConfig)


# ------------------------------------------------------------------------------------------ options


def parse_options(
    argv: Sequence[str] | None, usage: str, *sections: type
) -> tuple[list[str], dict[str, object]]:
    """Return the arguments that are not options, and the values of the options by full name.

    If an option is repeated, the last one wins; a list option collects its values. With --help,
    prints the help and exits.
    """
    # an option has two names: `n_layer` and `model.n_layer`; all short names differ
    settings = {name: field for each in sections for name, field in settings_of(each).items()}
    options = settings | {field.name: field for field in settings.values()}
    parser = _option_parser(usage, settings)
    argv = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & set(argv):
        print(parser.format_help(), end="", flush=True)
        raise SystemExit(0)

    try:
        found, rest = parser.parse_known_args([_spell_option(word, options) for word in argv])
    except argparse.ArgumentError as error:  # an option without a value
        name = error.argument_name
        raise ConfigError(
            f"{name}: has no value; it must be {describe_allowed(options[name[2:]])}; "
            f"write {name}=VALUE, also for a value that begins with a dash"
        ) from None
    texts = vars(found)
    words = texts.pop("words", []) + rest
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0]
            known = {name: f"--{name}" for name in (*options, "help")}
            hint = suggest_setting(option[2:].replace("-", "_"), known, "--help lists all")
            raise ConfigError(f"unknown option {quoted(option)}; {hint}")

    values = {}
    for name, text in texts.items():
        with error_context(f"--{settings[name].name}"):
            values[name] = parse_value(settings[name], text)
    return words, values


def _option_parser(usage: str, settings: Mapping[str, Field]) -> argparse.ArgumentParser:
    """Return a parser that collects the texts of the options by full name."""
    parser = argparse.ArgumentParser(
        usage=usage,
        epilog=NOTES,
        formatter_class=partial(argparse.HelpFormatter, width=100, max_help_position=28),
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    groups = {"": parser}
    for name, field in settings.items():
        section, type_ = name.rpartition(".")[0], value_type(field)
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        allowed = (describe_allowed if field.metadata["choices"] else describe_limits)(field)
        default = f"{field.default:g}" if type(field.default) is float else quoted(field.default)
        default = "" if field.default in (None, "", ()) else f"default {default}"
        groups[section].add_argument(
            f"--{field.name}",
            dest=name,
            action="append" if type_ is tuple else "store",
            metavar="" if type_ is bool else "VALUE",
            help="; ".join(filter(None, [field.metadata["meaning"], allowed, default])),
        )
    return parser


def _spell_option(word: str, options: Mapping[str, Field]) -> str:
    """Write an option as the parser knows it: --model.n-layer as --n_layer, --compile with =true.

    With nargs="?", argparse would take the config file after --compile for its value.
    """
    match = re.fullmatch(r"--([\w.-]+)(=.*)?", word, re.DOTALL)
    field = options.get(match[1].replace("-", "_")) if match else None
    if not field:
        return word
    alone = "=true" if value_type(field) is bool else ""
    return f"--{field.name}{match[2] or alone}"


# ------------------------------------------------------------------------------------- config files


def read_config(path: str) -> dict[str, object]:
    """Return the checked settings in a config file by full name: `model.n_layer`.

    Raises ConfigError with a line for each of the first MAX_FAULTS wrong settings.
    """
    with error_context(path):
        settings, faults = {}, []
        for prefix, key, line, value in _flatten(_load(_read(path))):
            try:
                with error_context(f"line {line}"):
                    settings[prefix + key] = _parse_setting(prefix, key, value)
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
    file = beside_code(home_path(path))
    if file.is_dir():
        if holds_run(file):
            raise ConfigError(f"no such folder here; the run beside the code is {file}")
        nearby = ", ".join(_startable(file, file).values())
        raise ConfigError(f"is a folder without a run; give a config or a run folder: {nearby}")
    if file.suffix == ".safetensors":
        raise ConfigError(f"is a checkpoint; name its folder to resume the run: {file.parent}")
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        # a typo, or the name of a recipe without .yaml
        names = _startable(beside_code(Path("configs")), file)
        hint = did_you_mean(file.name, names, f"allowed: {', '.join(names.values())}")
        raise ConfigError(f"no such config or run folder; {hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}; save it as UTF-8") from None


def _startable(configs: Path, path: Path) -> dict[str, str]:
    """Return the paths of the configs in a folder, and of the runs near a wrong path, by name."""
    paths = {config.name: str(config) for config in sorted(configs.glob("*.yaml"))}
    paths |= {Path(run).name: run for run in runs_near(path)}
    return paths or {"shakespeare.yaml": "configs/shakespeare.yaml"}


def _load(text: str) -> dict[str, tuple[int, object]]:
    """Return the mapping in a YAML text: its line and its value by key.

    Each value is a string, a list or such a mapping.
    """
    import yaml  # here, so that a missing package is reported in one line

    class Loader(yaml.BaseLoader):  # constructs only strings, lists and mappings, whatever the tag
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            mapping = {}
            for key_node, value_node in node.value:
                key, line = self.construct_scalar(key_node), key_node.start_mark.line + 1
                if key in mapping:
                    before = f"as in line {mapping[key][0]}"
                    raise ConfigError(
                        f"line {line}: duplicate key {quoted(key)}, {before}; keep one"
                    )
                mapping[key] = (line, self.construct_object(value_node))
            return mapping

    try:
        loader = Loader(text)
        try:
            mapping = loader.get_single_data()
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"line {line}: not YAML ({problem}); {_hint(text)}") from None
    except Exception as error:  # others too, such as a ValueError for "\Uffffffff"
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}; {_hint(text)}") from None

    if mapping is None:
        raise ConfigError("is empty; give at least one setting")
    if not isinstance(mapping, dict):
        raise ConfigError(f"must be lines of key: value; {_hint(text)}")
    return mapping


def _hint(text: str) -> str:
    """Return advice on a text that is not YAML; often the space after a colon is missing."""
    match = re.search(r"^ *(\w+):[^\s/]", text, re.MULTILINE)
    if match:
        return f"write a space after {quoted(match[1] + ':')}"
    return "check the indentation (spaces only), colons, quotes and brackets up to there"


def _flatten(mapping: dict[str, tuple[int, object]]) -> Iterator[tuple[str, str, int, object]]:
    """Yield the prefix, such as `model.`, the key, the line and the value of each setting."""
    for key, (line, value) in mapping.items():
        if key in SECTION_NAMES and isinstance(value, dict):
            for inner_key, line_and_value in value.items():
                yield f"{key}.", inner_key, *line_and_value
        else:
            yield "", key, line, value


def _parse_setting(prefix: str, key: str, value: object) -> object:
    """Parse an entry; raise ConfigError if there is no such setting, or its value is wrong."""
    name = prefix + key
    if name in SECTION_NAMES:
        raise ConfigError(f"{name} must be a mapping of keys to values; indent them below it")
    if name not in SETTINGS or "." in key:
        # a typo, the wrong section, or a name from another project
        names = {name: name for name in SECTION_NAMES}
        for full_name in SETTINGS:
            parent, _, short_name = full_name.rpartition(".")
            names[short_name] = f"{short_name} below {parent}" if parent else short_name
        hint = suggest_setting(key, names, "python train.py --help lists all")
        raise ConfigError(f"unknown key {quoted(key)}; {hint}")
    return parse_value(SETTINGS[name], value)
