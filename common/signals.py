"""Requests to stop a run before its last step: signals, and the time limit."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Self

TIME_LIMIT_REQUEST = 1  # request code of the time limit; that of a signal is its exit code
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 143, "SIGBREAK": 143}
STOPPING = b"\nstopping: finishing this step and saving"
CTRL_C = b"; press Ctrl-C again to exit at once"


def handle_signals(handler: Callable[[int, FrameType | None], object] | int) -> dict[int, object]:
    """Install a handler for every signal of EXIT_CODES that is not ignored; return the old ones.

    A command installs `exit_at_once` before its slow imports, and a handler of its own after them:
    an exception that is raised while a package is imported may be swallowed there. When its exit
    code is known, it installs SIG_IGN: a signal while Python shuts down must not change the code.
    """
    previous = {}
    for name in EXIT_CODES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
            previous[number] = signal.signal(number, handler)
    return previous


def exit_at_once(number: int, _: FrameType | None) -> None:
    """End the process with the signal's exit code, without a traceback or cleanup."""
    os._exit(EXIT_CODES[signal.Signals(number).name])


def unwind(number: int, _: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or SystemExit with the signal's exit code.

    Only the first signal raises; the next one ends the process at once.
    """
    handle_signals(exit_at_once)
    sys.unraisablehook = lambda _: None  # a destructor that is interrupted prints no traceback
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(EXIT_CODES[signal.Signals(number).name])


class Interrupted(Exception):
    """Raised to abandon repeatable work, such as an evaluation, because the run is stopping."""


class Stop:
    """Requests to stop the run, from signals (handled within a `with` block) and the time limit.

    Until `defer_signals` is called, there is nothing to save, and a signal ends the run at once.
    After that, a signal only sets a flag: the run reads `stop.requested`, saves and ends. A second
    Ctrl-C raises KeyboardInterrupt, and a third one ends the process at once. A signal that was
    ignored when the run started, such as SIGHUP under nohup, stays ignored.

    The processes of a distributed run must stop at the same step, so they agree on one
    `global_request`. The `local_request` of a process has no effect before they have agreed.
    """

    def __init__(self, deadline: float = math.inf):
        self.deadline = deadline  # of the time limit, on the clock of time.monotonic
        self.signal: str | None = None
        self.global_request: int | None = None
        self.signals_deferred = self._verbose = False

    def __enter__(self) -> Self:
        self._previous = handle_signals(self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer_signals(self, verbose: bool = True) -> None:
        """Defer later signals to the end of a step; if `verbose`, print when one is received."""
        self.signals_deferred, self._verbose = True, verbose

    @property
    def local_request(self) -> int:
        """The request of this process: 0, TIME_LIMIT_REQUEST, or the exit code of a signal."""
        if self.signal:
            return EXIT_CODES[self.signal]
        return TIME_LIMIT_REQUEST if time.monotonic() >= self.deadline else 0

    @property
    def request(self) -> int:
        """The request of the run, in the same codes."""
        return self.local_request if self.global_request is None else self.global_request

    @property
    def requested(self) -> bool:
        return self.request > 0

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after the other signals, else 0."""
        return self.request if self.request in EXIT_CODES.values() else 0

    def interruptible(self, items: Iterable) -> Iterator:
        """Yield the items; raise Interrupted as soon as this process is asked to stop."""
        for item in items:
            if self.local_request:
                raise Interrupted(self.local_request)
            yield item

    def _handle(self, number: int, _: FrameType | None) -> None:
        repeated, self.signal = self.signal is not None, self.signal or signal.Signals(number).name
        if not self.signals_deferred or (repeated and number == signal.SIGINT):
            unwind(number, None)
        if self._verbose:
            hint = CTRL_C if number == signal.SIGINT else b""
            with suppress(OSError):
                os.write(2, STOPPING + hint + b"\n")  # a system call: print is not reentrant
