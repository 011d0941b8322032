"""The command lines of train.py and sample.py, checked before torch is imported.

That import takes seconds, so whatever can be found out without it is reported first.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.console import (
    path_word,
    prepare_console,
    print_text,
    program,
    script,
    shell_command,
)
from common.errors import ConfigError
from configs.fields import (
    Checked,
    brief,
    error_context,
    setting,
    settings_of,
    unescape,
    universal_newlines,
)
from configs.options import command_help, parse_arguments
from configs.schema import Config, SampleConfig, from_dict

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
  python sample.py --ckpt out/shakespeare --num_samples=3 --temperature=0.6 --seed=7
"""
PAGE = b"<title>Hornbook</title>"  # in the first bytes of every page that --html writes


@dataclass(frozen=True)
class CommandLineOptions(Checked):
    """Options that are only for the command line, not for config files."""

    print_config: bool = setting(False, "print the complete settings as YAML and exit")
    resume: str | None = setting(
        None,
        "resume the run in out_dir with its settings, or from --resume=PATH; if there is none, "
        "start one",
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
    minutes: float | None = setting(
        None, "minutes that the run should take: time some steps, then choose max_iters", "(0, 1e6]"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other; give one of them")
        if self.allow_data_change and not self.resume:
            raise ConfigError("--allow_data_change only applies together with --resume")
        if self.new_characters == "add" and not self.init_from:
            raise ConfigError("--new_characters only applies together with --init_from")


@dataclass(frozen=True)
class Command(CommandLineOptions):
    """A command line of train.py: how to start, and settings by full name, of two origins.

    A new run has the settings of `file`, overridden by `options`; a resumed run has those of its
    checkpoint instead of the file's.
    """

    config_file: str = ""
    file: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)  # before torch is imported

    @property
    def out_dir(self) -> str:
        """The folder of the run; auto is out/<name of the config file>."""
        out_dir = self.options.get("out_dir", self.file.get("out_dir", "auto"))
        return f"out/{Path(self.config_file).stem}" if out_dir == "auto" else out_dir

    def file_settings(self) -> Config:
        """Return the settings that the file describes; raise ConfigError if they do not fit."""
        with error_context(self.config_file):
            return _override(Config(), self.file | {"out_dir": self.out_dir})

    def new_settings(self) -> Config:
        """Return the settings of a new run; raise ConfigError if they do not fit together."""
        where = f"{self.config_file} and the options" if self.options else self.config_file
        with error_context(where):
            return _override(Config(), self.file | self.options | {"out_dir": self.out_dir})

    def resumed_settings(self, saved: Config) -> Config:
        """Return the settings of a checkpoint, overridden by the options, to resume in out_dir."""
        with error_context("the settings of the checkpoint and the options"):
            return _override(saved, self.options | {"out_dir": self.out_dir})

    def resume_command(self, *more: str) -> str:
        """Return the shell command that resumes this run, whatever options started it."""
        words = [*_launcher(), script("train.py"), path_word(self.config_file)]
        if "out_dir" in self.options:
            words.append(f"--out_dir={self.out_dir}")
        return shell_command([*words, "--resume", *more])


def _launcher() -> list[str]:
    """Return the words of the command before train.py: python, or torchrun if it started us."""
    processes, machines = (
        int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
    if processes == machines == 1:
        return [program("python")]
    nodes = [f"--nnodes={machines}"] if machines > 1 else []
    return [program("torchrun"), *nodes, f"--nproc_per_node={processes}"]


def _override(config: Config, settings: Mapping[str, object]) -> Config:
    """Return a config with other values of some settings, which are given by full name."""
    nested = asdict(config)
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        target = nested[section] if section else nested
        target[key] = value
    return from_dict(nested)


@dataclass(frozen=True)
class SampleCommand:
    """A checked command line of sample.py."""

    options: SampleConfig
    prompt: str  # the text

    @property
    def prompt_is_file(self) -> bool:
        """Whether the prompt is from a file or from standard input."""
        return self.options.prompt == "-" or self.options.prompt.startswith("FILE:")


# ----------------------------------------------------------------------------------------- train.py


def parse_train(argv: Sequence[str] | None = None) -> Command:
    """Parse and check the arguments of train.py: a config file and the options that override it.

    Without `argv` they are those of the process. Exits after --help and --print_config. From here
    on, an error is one line with its exit code.
    """
    prepare_console()
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_text(train_help())
        raise SystemExit(0)
    from configs.strict_yaml import read_config, to_yaml  # only here: PyYAML may be missing

    words, options = parse_arguments(argv, CommandLineOptions, Config)
    if "minutes" in options and "train.max_iters" in options:
        raise ConfigError("--minutes and --max_iters contradict each other; give one of them")
    if len(words) != 1:
        config_words = brief(tuple(words)) if words else "none"
        raise ConfigError(
            "train.py takes one config file, such as configs/shakespeare.yaml, "
            f"but is given {config_words}; "
            "an option begins with -- and has its value after =, as in --resume=PATH; "
            "see python train.py --help"
        )
    names = options.keys() & settings_of(CommandLineOptions).keys()
    starting = {name: options.pop(name) for name in names}
    command = Command(config_file=words[0], file=read_config(words[0]), options=options, **starting)
    if command.print_config:
        print_text(to_yaml(command.new_settings()))
        raise SystemExit(0)
    if not command.resume:  # else the settings of the checkpoint decide
        command.new_settings()
    return command


def train_help() -> str:
    """Return what `python train.py --help` prints."""
    return command_help(TRAIN_USAGE, CommandLineOptions, Config)


# ---------------------------------------------------------------------------------------- sample.py


def parse_sample(argv: Sequence[str] | None = None) -> SampleCommand:
    """Parse and check the arguments of sample.py, and read the prompt.

    Without `argv` they are those of the process. Exits after --help. From here on, an error is one
    line with its exit code.
    """
    prepare_console()
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_text(sample_help())
        raise SystemExit(0)
    options = parse_sample_options(argv)
    if options.html:
        check_page(Path(options.html))
    return SampleCommand(options, read_prompt(options.prompt))


def check_page(path: Path) -> None:
    """Raise ConfigError if a file is there that is not a page of ours, which --html may replace."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        if PAGE not in file.read(4096):
            raise ConfigError(f"{path}: exists, and is not a Hornbook page; name another file")


def read_prompt(prompt: str) -> str:
    """Return the text of --prompt: the option itself, the content of a file, or standard input."""
    if prompt == "-":
        where, content = "standard input", sys.stdin.buffer.read()
    elif prompt.startswith("FILE:"):
        where = prompt.removeprefix("FILE:")
        content = Path(where).read_bytes()
    else:
        return unescape(prompt)
    try:
        return universal_newlines(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not UTF-8 at byte {error.start}; iconv -t UTF-8 converts it"
        ) from None


def parse_sample_options(argv: Sequence[str]) -> SampleConfig:
    """Parse the options of sample.py."""
    words, values = parse_arguments(argv, SampleConfig)
    if words:
        raise ConfigError(
            f"unexpected argument {brief(words[0])}; a checkpoint is given as --ckpt=PATH, "
            'a prompt as --prompt="TEXT"; see python sample.py --help'
        )
    values["stop"] = tuple(map(unescape, values.get("stop", ())))
    return from_dict(values, SampleConfig)


def sample_help() -> str:
    """Return what `python sample.py --help` prints."""
    return command_help(SAMPLE_USAGE, SampleConfig)
