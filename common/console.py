"""The console: all that is printed, and escaped here; commands to print; process entry."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from common.errors import ResourceError, UserError, is_out_of_memory
from common.signals import handle_signals, unwind

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


def print_error(error: object) -> None:
    """Print an error on standard error, if that is possible."""
    print_note(f"error: {error}")


def print_text(text: str) -> None:
    """Print a text of any length, such as a sample; raise ResourceError if that fails.

    It is printed unchanged, but on a terminal control characters are escaped, except newlines and
    tabs.
    """
    _write(escape(text, keep="\n\t") if sys.stdout.isatty() else text)


def _write(text: str) -> None:
    """Write to standard output at once; raise ResourceError if that fails.

    BrokenPipeError is left to `run_command`: it is not an error if the reader stops reading.
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


def run_script(main: Callable[[list[str]], int]) -> int:
    """Run the command of this process with `run_command`, without a traceback on a signal."""
    try:
        handle_signals(unwind)
        code = run_command(main)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as leaving:
        code = leaving.code
    handle_signals(signal.SIG_IGN)  # a signal during the shutdown must not change the code
    return code


def run_command(main: Callable[[list[str]], int]) -> int:
    """Run a command with the arguments of this process; return its exit code.

    A UserError becomes one line on standard error. So does running out of memory, even during the
    imports.
    """
    _open_closed_streams()
    try:
        code = main(sys.argv[1:])
        _write("")  # flush
    except KeyboardInterrupt:
        code = 130
        with suppress(OSError):
            print(flush=True)
    except UserError as error:
        print_error(error)
        code = error.exit_code
    except BrokenPipeError:  # the reader has exited (`| head`)
        code = 141
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print_error(
            f"out of memory ({type(error).__name__}): this machine, or a limit such as "
            "ulimit -v, leaves too little; free some memory or raise the limit"
        )
        code = ResourceError.exit_code
    _redirect_failed_streams()
    return code


def _open_closed_streams() -> None:
    """Open the null device for each closed stream; else the next file would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for terminals that lack a character


def _redirect_failed_streams() -> None:
    """If a stream cannot be flushed, redirect it to the null device: Python's exit would fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
