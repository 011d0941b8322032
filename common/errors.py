"""The errors that a user can fix, with their exit codes, and functions that phrase messages.

A message may contain control characters, for example from a file name. console.py escapes them when
it prints.
"""

import difflib
from collections.abc import Iterable

# in the messages of PyTorch, which raises RuntimeErrors, and of operating systems
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory", "bad_alloc")


class UserError(ValueError):
    """An error that the user can fix: `WHERE: what is wrong; what is allowed; what to do`.

    Each argument is a line: several only for a config file with several wrong settings.
    """

    exit_code = 2

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class ConfigError(UserError):
    """An invalid argument, setting or config file."""


class DataError(UserError):
    """A text that cannot be read, or is too small to train on."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, from another program, or does not fit."""

    exit_code = 4


class ResourceError(UserError):
    """Too little disk space or memory, or a device that does not exist."""

    exit_code = 5


class NonFiniteError(UserError):
    """A loss, gradient or weight that is infinite or NaN."""

    exit_code = 6


class RunInUseError(UserError):
    """A run folder that another process is using."""

    exit_code = 7


def first_few(items: Iterable[str]) -> str:
    """Join the first five items, followed by the number of the others."""
    items = list(items)
    more = f" and {len(items) - 5:,} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def counted(count: int, noun: str) -> str:
    """Return `1 item`, `2 items`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def did_you_mean(given: str, known: dict[str, str], otherwise: str) -> str:
    """Return `did you mean X?` for the known name nearest to `given`, or `otherwise`.

    `known` maps names to what is printed for them.
    """
    # the right name in the wrong section (train.n_layer), a typo, or the beginning of a name
    key = given.rpartition(".")[2]
    near = [key] if key in known else difflib.get_close_matches(given[:99], known, n=1)
    near = near or [name for name in known if given and name.startswith(given)]
    return f"did you mean {known[near[0]]}?" if near else otherwise


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(
        words in str(error).lower() for words in OUT_OF_MEMORY
    )
