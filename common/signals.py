"""Requests to stop a run before its last step: signals, and the time limit."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType

TIME_LIMIT = 1  # the request that the time limit makes; signals request their exit code
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 143, "SIGBREAK": 143}
STOPPING = b"\nstopping: finishing this step and saving"
CTRL_C = b"; press Ctrl-C again to exit at once"


def handle_signals(handler: Callable[[int, FrameType | None], object] | int) -> None:
    """Install a handler for every signal of EXIT_CODES that is not ignored.

    A command installs `exit_at_once` before its slow imports, then `unwind`, and when its exit code
    is known SIG_IGN, so that a signal while Python shuts down does not change the code.
    """
    for name in EXIT_CODES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, handler)


def exit_at_once(number: int, _: FrameType | None) -> None:
    """End the process with the signal's exit code: no traceback, no cleaning up."""
    os._exit(EXIT_CODES[signal.Signals(number).name])


def unwind(number: int, _: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or SystemExit with the signal's exit code.

    Exceptions do not follow one another: the next signal ends the process at once.
    """
    handle_signals(exit_at_once)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(EXIT_CODES[signal.Signals(number).name])


class Interrupted(Exception):
    """Raised to abandon repeatable work, such as an evaluation, because the run is stopping."""


class Stop:
    """Signal handlers for the length of a `with` block, and whether the run should stop.

    Until `defer` is called there is nothing to save, and a signal ends the process at once. From
    then on it sets a flag: the run sees `stop.requested`, saves and ends by itself. Only a second
    Ctrl-C ends the run at once, as KeyboardInterrupt, and a third one the process. A signal that is
    ignored when the run starts stays ignored, such as SIGHUP under nohup.

    Processes of a distributed run must stop at the same step. They agree on `global_request`; the
    `local_request` of one of them has no effect until then.
    """

    def __init__(self):
        self.started, self.deadline = time.monotonic(), math.inf
        self.signal: str | None = None
        self.global_request: int | None = None
        self.deferred = self._verbose = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Stop":
        for name in EXIT_CODES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def set_time_limit(self, minutes: float | None) -> None:
        """Limit the time from now on; None removes the limit."""
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def defer(self, verbose: bool = True) -> None:
        """Defer signals from now on to the end of the step; print so if `verbose`."""
        self.deferred, self._verbose = True, verbose

    @property
    def local_request(self) -> int:
        """The request of this process: 0, TIME_LIMIT, or the exit code of a signal."""
        if self.signal:
            return EXIT_CODES[self.signal]
        return TIME_LIMIT if time.monotonic() >= self.deadline else 0

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
        if not self.deferred or (repeated and number == signal.SIGINT):
            unwind(number, None)
        if self._verbose:
            hint = CTRL_C if number == signal.SIGINT else b""
            with suppress(OSError):
                os.write(2, STOPPING + hint + b"\n")  # a system call: print is not reentrant
