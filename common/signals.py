"""When a run is to stop before its last step: a signal asks for it, or its time is up."""

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType

TIME_IS_UP = 1
EXIT_CODES = {
    "SIGINT": 130,
    "SIGTERM": 143,
    "SIGHUP": 143,
    "SIGBREAK": 143,
}  # of those that the system has
ANSWER = b"\nstopping: this step is finished and saved; Ctrl-C again leaves at once\n"


class Interrupted(Exception):
    """What can be done again later was left, because the run is to stop."""


class Stop:
    """`with Stop() as stop:` answers signals; a run that is to end sees `stop.wanted`, saves and
    ends itself.

    Before `gently` is called there is nothing to save, and a signal ends the process at once. After
    it, a signal sets a flag and no more, so nothing is ever torn; only a second one that is a
    Ctrl-C leaves at once, as KeyboardInterrupt. A signal that is ignored when the run starts, as
    nohup does with SIGHUP, stays ignored. Among ranks, which must stop at the same step, `agreed`
    is what they all know of; what one of them has `heard` waits until then.
    """

    def __init__(self):
        self.deadline = math.inf
        self.signal: str | None = None
        self.agreed: int | None = None
        self._gentle = self._aloud = False
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

    def within(self, minutes: float | None) -> None:
        """Limit the time from here on."""
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def gently(self, aloud: bool = True) -> None:
        """From here on there is work to save; signals are answered in words, if `aloud`."""
        self._gentle, self._aloud = True, aloud

    @property
    def heard(self) -> int:
        """Why this process is to stop: TIME_IS_UP or the exit code of a signal; 0 where it may go
        on.
        """
        return (
            EXIT_CODES[self.signal]
            if self.signal
            else TIME_IS_UP * (time.monotonic() >= self.deadline)
        )

    @property
    def reason(self) -> int:
        """Why the run is to stop, in the same numbers."""
        return self.heard if self.agreed is None else self.agreed

    @property
    def wanted(self) -> bool:
        return self.reason > 0

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after the other signals, else 0."""
        return self.reason if self.reason in EXIT_CODES.values() else 0

    def watched(self, items: Iterable) -> Iterator:
        """The same items, until the run is to stop: Interrupted then."""
        for item in items:
            if self.heard:
                raise Interrupted(self.heard)
            yield item

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.signal = self.signal is not None, self.signal or signal.Signals(number).name
        if number == signal.SIGINT and (again or not self._gentle):
            raise KeyboardInterrupt
        if not self._gentle:
            raise SystemExit(self.heard)
        if self._aloud:
            with suppress(OSError):
                os.write(2, ANSWER)  # a system call, where print could meet itself
