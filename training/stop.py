"""A request to stop the run: Ctrl-C, SIGTERM or SIGUSR1 of a scheduler, a closed terminal."""

import os
import signal
import threading
from contextlib import suppress

NOTE = b"\nstopping: finishing this step and saving; Ctrl-C now leaves at once, without saving\n"


class Stop:
    """A flag that a signal sets, so that the run can finish its step, save and end.

    Signals are handled inside a `with` block, where a second Ctrl-C raises KeyboardInterrupt as
    usual. A signal that was ignored before, such as SIGHUP under nohup, stays ignored.
    """

    def __init__(self, verbose: bool):
        self.verbose = verbose  # say that a signal has been received
        self.exit_code = 0  # set by the first signal

    def __enter__(self) -> "Stop":
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        if threading.current_thread() is not threading.main_thread():
            numbers = []  # Python handles signals in its main thread alone
        self.before = {n: signal.getsignal(n) for n in numbers}
        for number in numbers:
            if self.before[number] != signal.SIG_IGN:
                signal.signal(number, self.handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, _: object) -> None:
        # only set a flag, which the loop reads after the step; a second Ctrl-C ends at once
        self.exit_code = self.exit_code or (130 if number == signal.SIGINT else 143)
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        # os.write, because print is not reentrant; the terminal may be closed
        if self.verbose:
            with suppress(OSError):
                os.write(2, NOTE)
