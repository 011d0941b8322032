"""The commands of the project, called in this process."""

from collections.abc import Callable

import sample
import train
from common.console import report
from configs.command import parse_train


def train_main(argv: list[str]) -> int:
    """Run train.py; return its exit code, or raise the UserError that ends it."""
    return _run(parse_train, train.main, argv)


def sample_main(argv: list[str]) -> int:
    """Run sample.py; return its exit code, or raise the UserError that ends it."""
    return _run(sample.parse_command, lambda command: sample.main(*command), argv)


def exit_code(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command as a process does; return the exit code, with any error on standard error."""
    try:
        return command(argv)
    except SystemExit as leaving:
        return leaving.code
    except BaseException as error:
        return report(error)


def _run(parse: Callable, main: Callable, argv: list[str]) -> int:
    try:
        command = parse(list(map(str, argv)))
    except SystemExit as leaving:  # after --help and --print-config
        return leaving.code
    return main(command)
