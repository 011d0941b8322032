"""The command lines of train.py and sample.py, checked before torch is imported.

That import takes seconds, so whatever can be found out without it is reported first.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from common.console import path_word, prepare_console, print_text, script, shell_command
from common.errors import ConfigError, UserError
from common.torchrun import NOT_LAUNCHED, Ranks, let_another_rank_report, silence
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
from configs.scaling import changed_lengths, scaled_to, scaling_note
from configs.schema import Config, SampleConfig, TrainConfig, check_memory, from_dict

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
  python sample.py --ckpt out/shakespeare --num_samples=3 --temperature=0.6 --seed=7
"""
PAGE = b"<title>Hornbook</title>"  # in the first bytes of every page that --html writes
# options that a resume must not repeat
STARTING_OPTIONS = ("resume", "overwrite", "init_from", "new_characters", "allow_data_change")


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
    given: Mapping[str, list[str]] = field(default_factory=dict)  # options as typed, by full name
    scaling_note: str | None = None  # which settings were scaled with max_iters
    ranks: Ranks = NOT_LAUNCHED
    started: float = field(default_factory=time.monotonic)  # before torch is imported

    @property
    def out_dir(self) -> str:
        """The folder of the run; auto is out/<name of the config file>."""
        if self.config.out_dir == "auto":
            return f"out/{Path(self.config_file).stem}"
        return self.config.out_dir

    @property
    def deadline(self) -> float:
        """When --time_limit ends the run, on the clock of time.monotonic; infinity without it."""
        return self.started + 60 * (self.time_limit or float("inf"))

    @property
    def given_train(self) -> dict[str, object]:
        """The values of the options of the section `train`, which --minutes must not change."""
        names = [name.removeprefix("train.") for name in self.given if name.startswith("train.")]
        return {name: getattr(self.config.train, name) for name in names}

    def with_config(self, **sections: object) -> Self:
        """Return the command with other settings: `with_config(train=...)`."""
        return replace(self, config=replace(self.config, **sections))

    def repeat_command(self, *, resume: bool, changes: Mapping[str, object] | None = None) -> str:
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
        return shell_command([*self.ranks.launcher, script("train.py"), *words])


@dataclass(frozen=True)
class SampleCommand:
    """A checked command line of sample.py."""

    options: SampleConfig
    prompt: str


# ----------------------------------------------------------------------------------------- train.py


def parse_train(argv: Sequence[str] | None = None) -> Command:
    """Parse and check the arguments of train.py: a config file and the options that override it.

    Without `argv` they are those of the process. Exits after --help and --print_config. From here
    on, an error is one line with its exit code. With several ranks, only rank 0 prints, and only
    local rank 0 reports an error, which all of them have.
    """
    prepare_console()
    argv = sys.argv[1:] if argv is None else argv
    ranks = Ranks.from_environment(os.environ)
    if ranks.rank > 0:
        silence()
    if "--help" in argv or "-h" in argv:
        print_text(train_help())
        raise SystemExit(0)
    try:
        command = _read_command(argv, ranks)
        if command.print_config:
            from configs.strict_yaml import to_yaml  # only here: PyYAML may be missing

            print_text(to_yaml(command.config))
            raise SystemExit(0)
        ranks.batch_slice(command.config.train.batch_size)
    except UserError:
        if ranks.local_rank > 0:
            let_another_rank_report()
        raise
    return command


def _read_command(argv: Sequence[str], ranks: Ranks) -> Command:
    """Read the config file, and override its settings by the options."""
    from configs.strict_yaml import read_config  # only here: PyYAML may be missing

    # the options of the command line: how to start, and settings
    words, values, given = parse_arguments(argv, CommandLineOptions, Config)
    if "minutes" in values and "train.max_iters" in values:
        raise ConfigError("--minutes and --max_iters contradict each other; give one of them")
    if len(words) != 1:
        config_words = brief(tuple(words)) if words else "none"
        raise ConfigError(
            "train.py takes one config file, such as configs/shakespeare.yaml, "
            f"but is given {config_words}; "
            "an option begins with -- and has its value after =, as in --resume=PATH; "
            "see python train.py --help"
        )
    command_names = values.keys() & settings_of(CommandLineOptions).keys()
    command_options = {name: values.pop(name) for name in command_names}

    # the settings of the file, overridden by those of the command line
    file = read_config(words[0])
    nested, note = _nested(file | values), None
    with error_context(f"{words[0]} and the options" if values else words[0]):
        if "train.max_iters" in values:
            # scale the lengths in the file, which suit the file's max_iters
            before = from_dict(_nested(file).get("train", {}), TrainConfig)
            options = _nested(values)["train"]
            after = scaled_to(before, options)
            nested["train"] = vars(after)
            note = scaling_note(after.max_iters, changed_lengths(before, after, given=options))
        config = from_dict(nested)
        check_memory(config.model)
    return Command(
        config_file=words[0],
        config=config,
        out_dir_given=values.get("out_dir", "auto") != "auto",
        given=given,
        scaling_note=note,
        ranks=ranks,
        **command_options,
    )


def _nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by full name as nested data: {"train": {"max_iters": 100}, "seed": 1}."""
    nested = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        target = nested.setdefault(section, {}) if section else nested
        target[key] = value
    return nested


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
    words, values, _ = parse_arguments(argv, SampleConfig)
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
