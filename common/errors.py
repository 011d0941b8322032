"""What a user is told: one class per exit code, and one function that makes foreign text safe to
print.
"""

import os
import sys
import unicodedata
from collections.abc import Callable


class UserError(ValueError):
    """A mistake or fault that the user can mend: `WHERE: what is wrong; what is allowed; what to
    do`.
    """

    exit_code = 2


class ConfigError(UserError):
    """A wrong argument, setting or config file."""


class DataError(UserError):
    """A text that cannot be read or is too small to learn from."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, foreign or does not fit."""

    exit_code = 4


class ResourceError(UserError):
    """Not enough disk or memory, or no such device."""

    exit_code = 5


class NonFiniteError(UserError):
    """A loss or gradient that is infinite or not a number."""

    exit_code = 6


class RunInUseError(UserError):
    """The run folder belongs to another process that is still alive."""

    exit_code = 7


def printable(text: object, keep: str = "") -> str:
    """`text` with its control, bidirectional, surrogate and unassigned characters escaped, as
    `\\x1b`.

    Everything that came from outside passes through here before it is printed: config keys, file
    names, checkpoint strings, generated text. Characters in `keep` (say, newlines) stay as they
    are, and so do the joiners that emoji and Indic scripts are written with.
    """
    keep += "\u200c\u200d"
    return "".join(c if c in keep or _is_harmless(c) else _escape(c) for c in str(text))


def _is_harmless(c: str) -> bool:
    return unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029"


def _escape(c: str) -> str:
    return c.encode("unicode_escape").decode()


def run_command(main: Callable[[list[str]], int]) -> int:
    """Run a command on the arguments of this process; its exit code, with one line for a user's
    mistake.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one that is closed is None
        stream.reconfigure(
            errors="backslashreplace"
        )  # a terminal that lacks a character shows its escape
    try:
        code = main(sys.argv[1:])
        print(end="", flush=True)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader has gone (`| head`): let the exit's own flush go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(flush=True)
        return 130
