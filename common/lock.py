"""One writer per run folder: a lock that the system releases however its holder ends."""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import ResourceError, RunInUseError, escape

# do not follow symbolic links, and do not wait for the other end of a pipe
FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
LOCKED_BYTE = 2**30  # Windows blocks reads of a locked byte, so lock one after the content


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created if necessary, until the end of the block.

    Raises RunInUseError, which names the process that holds the lock, and ResourceError if the
    folder cannot be written, or if its .lock is not a lock of this program. On a file system
    without locks there is no protection.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", FLAGS, 0o666)
    except OSError as error:
        if os.path.islink(folder / ".lock"):
            raise _not_ours(folder) from error
        raise ResourceError(
            f"out_dir: cannot write to {escape(folder)} ({error.strerror}); "
            "choose another --out_dir"
        ) from error
    with os.fdopen(handle, "r+b", buffering=0) as file:
        found = os.fstat(handle)
        # a file with a second hard link must not be changed: it is also a file elsewhere
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise _not_ours(folder)
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            raise RunInUseError(
                f"out_dir: {escape(folder)} is in use by {_holder(file)}; a folder has one writer "
                "at a time; wait for that process, stop it or choose another --out_dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        if (content := _read(file)) and not content.startswith("pid "):
            raise _not_ours(folder)
        with suppress(OSError):  # the disk is full: the lock works without its content
            file.truncate(0)
            file.seek(0)
            file.write(f"pid {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode())
        yield


def _not_ours(folder: Path) -> ResourceError:
    return ResourceError(
        f"out_dir: {escape(folder / '.lock')} is not a lock of this program; "
        "remove it or choose another --out_dir"
    )


def _lock(file: BinaryIO) -> None:
    if os.name == "nt":
        import msvcrt

        file.seek(LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(file: BinaryIO) -> str:
    """Return what the holder of the lock wrote about itself."""
    time.sleep(0.1)  # the holder may have taken the lock just now, and not written yet
    return escape(_read(file))


def _read(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(100).decode(errors="replace")
