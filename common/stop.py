"""A request to stop the run: Ctrl-C, or a signal of a scheduler, a closed terminal, a shutdown."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Self

# Before a time limit, Slurm sends SIGUSR1 if `sbatch --signal=USR1@120` asks for it, SGE sends
# SIGUSR1 or SIGUSR2, and the system SIGXCPU, every second. A script that restarts a stopped run
# needs one code for all but Ctrl-C.
EXIT_CODES = {"SIGINT": 130} | dict.fromkeys(
    ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"), 143
)
NOTE = b"\nstopping: finishing this step and saving; Ctrl-C now leaves at once, without saving\n"


class Interrupted(Exception):
    """A request to abandon repeatable work, such as an evaluation: the run is stopping."""


class Stop:
    """A flag that a signal sets, so that the run can finish its step, save and end.

    Signals are handled inside a `with` block, where a second Ctrl-C raises KeyboardInterrupt as
    usual. A signal that was ignored before, such as SIGHUP under nohup, stays ignored. Outside the
    main thread, where Python allows no handlers, all signals stay as they are.
    """

    def __init__(self, verbose: bool = True):
        self.verbose = verbose  # say that a signal has been received
        self.exit_code = 0  # set by the first signal

    @property
    def requested(self) -> bool:
        return self.exit_code > 0

    def __enter__(self) -> Self:
        self._before = {}
        is_main_thread = threading.current_thread() is threading.main_thread()
        for name in EXIT_CODES if is_main_thread else ():
            number = getattr(signal, name, None)  # Windows lacks most of them
            if number and signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def interruptible(self, items: Iterable) -> Iterator:
        """Yield the items; raise Interrupted between two of them if a stop is requested."""
        for item in items:
            if self.requested:
                raise Interrupted
            yield item

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            return
        # only set a flag; the loop checks it after the step
        self.exit_code = EXIT_CODES[signal.Signals(number).name]
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        # os.write, because print is not reentrant; the terminal may be closed
        if self.verbose:
            with suppress(OSError):
                os.write(2, NOTE)
