"""One writer per run folder, by a lock that the system releases when its holder ends, however it
ends.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from common.errors import ResourceError, RunInUseError, escape

BEYOND = 2**30  # Windows forbids others to read what is locked, so lock a byte that nobody reads


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made where there is none, for as long as the block lasts.

    RunInUseError (exit 7) names the process that holds it already; ResourceError (exit 5) where it
    cannot be written. A file system that knows no locks is trusted to have one writer.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ResourceError(
            f"out_dir: cannot write to {escape(folder)} ({error.strerror}); choose another "
            f"--out_dir"
        ) from error
    with os.fdopen(handle, "r+", encoding="utf-8", errors="replace") as file:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            raise RunInUseError(
                f"out_dir: {escape(folder)} is in use by {_holder(file)}; one run at a time "
                f"writes to a folder; "
                "wait for it, stop it or choose another --out_dir"
            ) from None
        except OSError:
            pass
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        yield


def _lock(file: TextIO) -> None:
    if os.name == "nt":
        import msvcrt

        file.seek(BEYOND)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(file: TextIO) -> str:
    time.sleep(0.1)  # it may have got the lock just now and not written who it is
    file.seek(0)
    return escape(file.read(100))
