"""One writer per run folder: a lock that the system releases when its holder ends in any way."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from common.errors import ResourceError, RunInUseError, escape

LOCKED_BYTE = 2**30  # Windows denies reading what is locked, so lock a byte that nobody reads


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created if necessary, until the end of the block.

    Raises RunInUseError, which names the process that holds the lock, and ResourceError if the
    folder cannot be written. On a file system without locks there is no protection.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ResourceError(
            f"out_dir: cannot write to {escape(folder)} ({error.strerror}); "
            "choose another --out_dir"
        ) from error
    with os.fdopen(handle, "r+", encoding="utf-8", errors="replace") as file:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            raise RunInUseError(
                f"out_dir: {escape(folder)} is in use by {_holder(file)}; a folder has one writer "
                "at a time; wait for it, stop it or choose another --out_dir"
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

        file.seek(LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(file: TextIO) -> str:
    """Return what the holder of the lock wrote about itself."""
    time.sleep(0.1)  # it may have just taken the lock and not written yet
    file.seek(0)
    return escape(file.read(100))
