"""When a run is to stop before its last step: a signal asks for it, or its time is up."""

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 143, "SIGBREAK": 143}  # of those that the system has
ANSWER = b"\nstopping: this step is finished and saved; Ctrl-C again leaves at once\n"


class Interrupted(Exception):
    """What can be done again later was left, because the run is to stop."""


class Stop:
    """`with Stop(minutes) as stop:` answers signals; a run that is to end sees `stop.wanted`, saves and ends itself.

    Before `gently` is called there is nothing to save, and a signal ends the process at once. After it, a signal sets a
    flag and no more, so nothing is ever torn; only a second one that is a Ctrl-C leaves at once, as KeyboardInterrupt.
    A signal that is ignored when the run starts, as nohup does with SIGHUP, stays ignored.
    """

    def __init__(self, minutes: float | None = None):
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.signal: str | None = None
        self._gentle = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Stop":
        for name in EXIT_CODES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def gently(self) -> None:
        """From here on there is work to save."""
        self._gentle = True

    @property
    def wanted(self) -> bool:
        return self.signal is not None or time.monotonic() >= self.deadline

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after the other signals, else 0."""
        return EXIT_CODES[self.signal] if self.signal else 0

    def watched(self, items: Iterable) -> Iterator:
        """The same items, until the run is to stop: Interrupted then."""
        for item in items:
            if self.wanted:
                raise Interrupted
            yield item

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.signal = self.signal is not None, self.signal or signal.Signals(number).name
        if number == signal.SIGINT and (again or not self._gentle):
            raise KeyboardInterrupt
        if not self._gentle:
            raise SystemExit(self.exit_code)
        with suppress(OSError):
            os.write(2, ANSWER)  # a system call, where print could meet itself
