"""The console: what a command prints, how it ends, and the commands that it prints."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from common.errors import UserError, is_out_of_memory
from common.files import ROOT
from common.words import escape_controls, printable

PACKAGES = ("torch", "numpy", "tqdm", "yaml", "filelock", "safetensors")  # requirements.txt
SCRIPTS = ("train.py", "sample.py", "convert.py")


def prepare_console() -> None:
    """Handle uncaught exceptions with `report`; prepare the standard streams."""
    if not hasattr(sys, "ps1"):  # Python's prompt stays open
        sys.excepthook = _end
    # a stream is None after `>&-`, and without a console on Windows
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115

    # A terminal keeps its encoding; what that lacks is escaped. Files and pipes get UTF-8.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not so the streams of notebooks and IDLE
            encoding = None if stream.isatty() else "utf-8"  # None: as it is
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _end(_, error: BaseException, __) -> NoReturn:
    raise SystemExit(report(error))


def report(error: BaseException) -> int:
    """Report the exception that ends a command; return the exit code.

    Errors that the user, the disk or the memory causes are one line. Anything else is a bug, of
    Hornbook or of a fork, and is printed with its traceback.
    """
    # Ctrl-C; the terminal has printed ^C
    if isinstance(error, KeyboardInterrupt):
        print_stderr("")
        return 130

    # the reader has gone (`| head`); discard what Python flushes as it exits
    if isinstance(error, BrokenPipeError):
        discard_output()
        return 141

    if isinstance(error, UserError):
        print_error(error)
        return error.exit_code

    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        # into a virtual environment, because the Python of many systems refuses pip
        install = "python3 -m venv .venv; .venv/bin/python -m pip install -r requirements.txt"
        line = f"{error}; `make train` installs the packages in .venv; without make: {install}"
    elif is_out_of_memory(error):
        line = "out of memory; choose a smaller batch_size, block_size or model"
        if reason := str(error).partition("\n")[0]:
            line += f" ({reason})"
    # a missing file of the user raises a UserError; any other one is a file of the code: a bug
    elif isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        reason = error.strerror or error
        line = f"{error.filename}: {reason}" if error.filename else reason
    else:
        sys.__excepthook__(type(error), error, error.__traceback__)
        return 1
    print_stderr(f"error: {line}")
    return 5


# ----------------------------------------------------------------------------------------- printing


def discard_output() -> None:
    """Discard all further standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_result(*lines: object) -> None:
    """Print lines on standard output."""
    # flush, because Python buffers what it writes to a pipe
    print(printable(lines), flush=True)


def print_stderr(*lines: object) -> None:
    """Print lines on standard error, if that is still open."""
    with suppress(OSError):
        print(printable(lines), file=sys.stderr, flush=True)


def print_error(error: UserError) -> None:
    """Print an error on standard error: a line for each of its arguments."""
    print_stderr(*(f"error: {line}" for line in error.args))


def print_text(text: str) -> None:
    """Print a text as it is; on a terminal, escape its control characters."""
    # a terminal would execute escape sequences, even those that a model makes up
    shown = escape_controls(text, keep="\n\t") if sys.stdout.isatty() else text
    print(shown, end="", flush=True)


# -------------------------------------------------------------------------------- commands to print


def shell_command(words: Iterable[object]) -> str:
    """Join words to a shell command, with quotes where the shell needs them."""
    words = list(map(str, words))
    return subprocess.list2cmdline(words) if os.name == "nt" else " ".join(map(_quote, words))


def _quote(word: str) -> str:
    """Quote a word, with double quotes where these are enough: every shell understands them."""
    quoted = shlex.quote(word)
    return quoted if quoted == word or re.search(r'["$`\\!]', word) else f'"{word}"'


def script_command(script: str, *arguments: object) -> str:
    """Return the shell command that runs one of our scripts with the Python of this process.

    Python and the folder of the script are written as they were typed: `python sample.py --ckpt X`.
    """
    folder = ROOT  # for a notebook, or a script of the user, that calls `train.main`
    if Path(sys.argv[0]).name in SCRIPTS:
        folder = Path(sys.argv[0]).parent
    return shell_command([sys.orig_argv[0], folder / script, *arguments])
