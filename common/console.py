"""What a command prints, the errors that a user can fix, and how a command ends.

A message may contain control characters, for example from a file name; they are escaped where it is
printed.
"""

import io
import os
import re
import sys
from contextlib import suppress

from common.messages import printable

PACKAGES = ("torch", "numpy", "tqdm", "yaml", "filelock", "safetensors")  # requirements.txt
OUT_OF_MEMORY = "out of memory|DefaultCPUAllocator"  # PyTorch on a GPU, on a CPU


class UserError(ValueError):
    """An error that the user can fix: `WHERE: what is wrong; what is allowed; what to do`.

    Each argument is a line: several only for a config file with several wrong settings.
    """

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints in place of a traceback, also under %run."""
        return [f"error: {printable(line)}" for line in self.args]


class ConfigError(UserError):
    """An invalid argument, setting or config file."""


class DataError(UserError):
    """A text that cannot be read, or is too small to train on."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, from another program, or does not fit."""


class ResourceError(UserError):
    """Too little disk space, a device that does not exist, or a run folder that is in use."""


class NonFiniteError(UserError):
    """A loss, gradient or weight that is infinite or NaN."""


# ---------------------------------------------------------------------------- the end of a command


def prepare_console() -> None:
    """Let `report_error` handle exceptions; choose the encodings of the standard streams."""
    if not hasattr(sys, "ps1"):  # Python's prompt stays open
        sys.excepthook = lambda _, error, __: sys.exit(report_error(error))
    # A terminal keeps its encoding; what that lacks is escaped. Files and pipes get UTF-8.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not so in notebooks and IDLE
            encoding = None if stream.isatty() else "utf-8"  # None: as it is
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def report_error(error: BaseException) -> int:
    """Report the exception that ends a command; return the exit code.

    Errors that the user, the disk or the memory causes are one line. Anything else is a bug, of
    Hornbook or of a fork, and is printed with its traceback.
    """
    if isinstance(error, KeyboardInterrupt):  # the terminal has printed ^C
        print_stderr("")
        return 130
    if isinstance(error, BrokenPipeError):  # the reader has gone (`| head`)
        discard_output()
        return 141
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, UserError):
        lines = error.args
    elif isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        lines = [f"{error}; `make train` installs it; or: pip install -r requirements.txt"]
    elif isinstance(error, MemoryError) or (
        re.search(OUT_OF_MEMORY, str(error)) and not isinstance(error, OSError)
    ):
        lines = [f"out of memory ({reason}); choose a smaller batch_size, block_size or model"]
    elif type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        lines = [f"compile: torch.compile cannot compile here ({reason}); use --compile=false"]
    # a missing file of the user raises a UserError; any other one is a file of the code: a bug
    elif isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        lines = [error]
    else:
        sys.__excepthook__(type(error), error, error.__traceback__)
        return 1
    print_stderr(*(f"error: {line}" for line in lines))
    return 2


# ---------------------------------------------------------------------------------------- printing


def discard_output() -> None:
    """Discard all further standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(*lines: object) -> None:
    """Print lines above the progress bar, if there is one; without a reader (`| head`), go on."""
    from tqdm import tqdm  # here, so that a missing package is reported in one line

    try:
        tqdm.write("\n".join(map(printable, lines)), file=sys.stdout)
        sys.stdout.flush()
    except OSError:
        discard_output()


def print_stderr(*lines: object) -> None:
    """Print lines on standard error, if that is still open."""
    with suppress(OSError):
        print("\n".join(map(printable, lines)), file=sys.stderr, flush=True)


def print_text(text: str) -> None:
    """Print a text as it is; on a terminal, escape its control characters."""
    # a terminal would execute escape sequences, even those that a model makes up
    if sys.stdout.isatty():
        text = "\n".join(map(printable, text.split("\n")))
    print(text, end="", flush=True)
