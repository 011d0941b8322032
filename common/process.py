"""The process of a command: how it starts, and how every end of it gets its exit code."""

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from common.console import print_error
from common.errors import ResourceError, UserError, is_out_of_memory
from common.packages import check_packages
from common.signals import exit_at_once, handle_signals


def start_command() -> None:
    """Prepare this process for a command, before its slow imports.

    From here on a signal ends it at once with its exit code, and an uncaught exception as `report`
    says. Raises ResourceError if a package is missing.
    """
    handle_signals(exit_at_once)
    _open_closed_streams()
    sys.excepthook = lambda _, error, __: end_command(report(error))
    check_packages()


def end_command(code: int) -> NoReturn:
    """End the process with this exit code, which a late signal does not change."""
    handle_signals(signal.SIG_IGN)
    _redirect_failed_streams()
    sys.exit(code)


def report(error: BaseException) -> int:
    """Report the exception that ended a command; return the exit code.

    A UserError is one line on standard error. So is running out of memory, even during the imports.
    Anything else is a bug, with a traceback.
    """
    if isinstance(error, UserError):
        print_error(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        with suppress(OSError):
            print(flush=True)
        return 130
    if isinstance(error, BrokenPipeError):  # the reader has exited (`| head`)
        return 141
    if isinstance(error, OSError) and not is_out_of_memory(error):
        return report(ResourceError(f"{error.filename}: {(error.strerror or str(error)).lower()}"))
    if is_out_of_memory(error):
        return report(
            ResourceError(
                f"out of memory ({type(error).__name__}): this machine, or a limit such as "
                "ulimit -v, leaves too little; free some memory or raise the limit"
            )
        )
    sys.__excepthook__(type(error), error, error.__traceback__)
    return 1


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
