"""The console: all that is printed, and escaped here; commands to print."""

import os
import shlex
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from common.errors import ResourceError, UserError

MAX_LINE = 4000  # characters; the middle of a longer line is left out


def escape(text: object, keep: str = "") -> str:
    """Escape control, bidirectional, surrogate and unassigned characters, for example to `\\x1b`.

    A terminal must not obey what is printed: a file name, a config key, generated text. Characters
    in `keep` are not escaped, and neither are the joiners that emoji and Indic scripts need.
    """
    keep += "\u200c\u200d"
    return "".join(c if c in keep or _is_harmless(c) else _escape_character(c) for c in str(text))


def _is_harmless(c: str) -> bool:
    return unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029"


def _escape_character(c: str) -> str:
    return c.encode("unicode_escape").decode()


def shorten(text: str, limit: int = MAX_LINE) -> str:
    """Leave out the middle of a text of more than `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def printable(lines: Iterable[object]) -> str:
    """Escape and shorten each line. A newline in one is escaped too: it cannot begin another."""
    return "\n".join(shorten(escape(line)) for line in lines)


def print_result(*lines: object) -> None:
    """Print lines on standard output; raise ResourceError if that fails."""
    _write(f"{printable(lines)}\n")


def print_note(*lines: object) -> None:
    """Print lines on standard error, if that is possible."""
    with suppress(OSError):
        print(printable(lines), file=sys.stderr, flush=True)


def print_error(error: UserError) -> None:
    """Print an error on standard error, if that is possible: a line for each of its arguments."""
    print_note(*(f"error: {line}" for line in error.args))


def print_text(text: str) -> None:
    """Print a text of any length, such as a sample; raise ResourceError if that fails.

    It is printed unchanged, but on a terminal control characters are escaped, except newlines and
    tabs.
    """
    _write(escape(text, keep="\n\t") if sys.stdout.isatty() else text)


def _write(text: str) -> None:
    """Write to standard output at once; raise ResourceError if that fails.

    BrokenPipeError is not converted: it is not an error if the reader stops reading.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ResourceError(
            f"standard output: cannot be written ({error.strerror}); redirect it elsewhere"
        ) from error


def stdout_is_closed() -> bool:
    """Return whether this process was started without a standard output."""
    return getattr(sys.stdout, "name", "") == os.devnull


def shell_command(words: Iterable[object]) -> str:
    """Return the shell command to print for these words, with quotes where a shell needs them.

    If a word contains a control character, or the command is too long for a line, the reason why
    no command is printed is returned instead.
    """
    words = list(map(str, words))
    command = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    if escape(command) != command:
        return "(no command is printed: a name in it contains control characters)"
    if len(command) > MAX_LINE // 2:
        return "(no command is printed: it is too long)"
    return command


def path_word(path: object) -> str:
    """Return a path as a word of a command that cannot be mistaken for an option, `auto` or `~`."""
    text = str(path)
    return f"./{text}" if text == "auto" or text[:1] in ("-", "~") else text


def program(name: str) -> str:
    """Return the word that starts a program of this Python environment, such as tensorboard.

    It is the bare name if a shell finds this program by it, else a path: `.venv/bin/python`.
    """
    found, folder = shutil.which(name), Path(sys.executable).parent
    if not sys.executable or (found and Path(found).parent == folder):
        return name
    with suppress(ValueError):
        return str((folder / name).relative_to(Path.cwd()))
    return str(folder / name)


def script(name: str) -> str:
    """Return the path of a script of the project from the working directory: `train.py`."""
    path = Path(__file__).parents[1] / name
    with suppress(OSError):
        if path.samefile(name):
            return name
    return str(path)
