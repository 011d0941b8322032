"""What a user is told: one class per exit code, and one function that makes foreign text safe to print."""

import unicodedata


class UserError(ValueError):
    """A mistake or fault that the user can mend: `WHERE: what is wrong; what is allowed; what to do`."""

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
    """`text` with every control, format (bidirectional too), surrogate and unassigned character escaped.

    Everything that came from outside passes through here before it is printed: config keys, file names,
    checkpoint strings, generated text. Characters in `keep` (say, newlines) stay as they are.
    """
    return "".join(
        c if c in keep or unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029" else _escape(c)
        for c in str(text)
    )


def _escape(c: str) -> str:
    return c.encode("unicode_escape").decode() if ord(c) > 0xFF or c in "\n\r\t" else f"\\x{ord(c):02x}"
