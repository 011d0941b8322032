"""One writer per run folder: a lock that the system releases however its holder ends."""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import ResourceError, RunInUseError

LOCKED_BYTE = 2**30  # Windows blocks reads of a locked byte, so lock one after the content


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created if necessary, until the end of the block.

    If an exception ends the block, the lock file and the folders that this call created are
    removed (folders only if they are empty): a start that fails leaves nothing behind.

    Raises RunInUseError, which names the process that holds the lock, and ResourceError if the
    folder cannot be written, or if its .lock is not a lock of this program. On a file system
    without locks there is no protection.
    """
    path = folder / ".lock"
    is_new = not os.path.lexists(path)
    new_folders = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        with _open(path) as file:
            _lock(path, file)
            with suppress(OSError):  # the disk is full: the lock holds, without its holder's name
                file.truncate(0)
                file.write(f"pid {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode())
            try:
                yield
            except BaseException:
                if os.name == "nt":  # Windows does not remove a file that is open
                    file.close()
                if is_new:
                    with suppress(OSError):
                        path.unlink()
                raise
    except BaseException:
        with suppress(OSError):
            for new_folder in new_folders:
                new_folder.rmdir()
        raise


def _open(path: Path) -> BinaryIO:
    """Open the lock file; raise ResourceError if that fails or it is not a lock of this program."""
    not_ours = ResourceError(
        f"out_dir: {path} is not a lock of this program; remove it or choose another --out_dir"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):  # a link, a pipe or a folder
                raise not_ours
        file = open(path, "ab+", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise ResourceError(
            f"out_dir: cannot write to {path.parent} ({error.strerror}); choose another --out_dir"
        ) from error
    content = _read(file)
    if content and not content.startswith(b"pid "):
        file.close()
        raise not_ours
    return file


def _read(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(100)


def _lock(path: Path, file: BinaryIO) -> None:
    """Lock the open lock file; raise RunInUseError if another process holds it."""
    try:
        _lock_file(file)
    except (BlockingIOError, PermissionError):
        time.sleep(0.1)  # the holder may have taken the lock just now, and not written yet
        holder = _read(file).decode(errors="replace") or "another process"
        raise RunInUseError(
            f"out_dir: {path.parent} is in use by {holder}; a folder has one writer at a time; "
            "wait for that process, stop it or choose another --out_dir"
        ) from None
    except OSError:  # a file system without locks
        return
    # a holder whose start failed may have removed the file before it was locked here
    in_place = os.name == "nt"
    with suppress(FileNotFoundError):
        in_place = in_place or os.path.samefile(path, file.fileno())
    if not in_place:
        raise RunInUseError(
            f"out_dir: another start in {path.parent} failed at this moment; run the command again"
        )


def _lock_file(file: BinaryIO) -> None:
    if os.name == "nt":
        import msvcrt

        file.seek(LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
