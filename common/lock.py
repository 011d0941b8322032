"""One writer per run folder: a lock that the system releases however its holder ends."""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import ResourceError, RunInUseError

# do not follow symbolic links, and do not wait for the other end of a pipe
FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
LOCKED_BYTE = 2**30  # Windows blocks reads of a locked byte, so lock one after the content
ATTEMPTS = 10  # to lock a file that other processes remove


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
    new_folders = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        with _open_locked(folder) as file:
            with suppress(OSError):  # the disk is full: the lock holds, without its holder's name
                file.truncate(0)
                file.seek(0)
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
            for each in new_folders:
                each.rmdir()
        raise


def _open_locked(folder: Path) -> BinaryIO:
    """Open and lock the lock file; retry if its last holder removes it before it is locked."""
    for _ in range(ATTEMPTS):
        with ExitStack() as stack:
            file = stack.enter_context(_open(folder))
            _lock_ours(folder, file)
            if _is_in_place(folder / ".lock", file):
                stack.pop_all()
                return file
    raise _in_use(folder, "other processes that lock it again and again")


def _open(folder: Path) -> BinaryIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", FLAGS, 0o666)
    except OSError as error:
        if os.path.islink(folder / ".lock"):
            raise _not_ours(folder) from error
        raise ResourceError(
            f"out_dir: cannot write to {folder} ({error.strerror}); choose another --out_dir"
        ) from error
    return os.fdopen(handle, "r+b", buffering=0)


def _lock_ours(folder: Path, file: BinaryIO) -> None:
    """Lock the lock file; raise RunInUseError if it is locked, ResourceError if it is not ours."""
    found = os.fstat(file.fileno())
    # a file with a second hard link must not be changed: it is also a file elsewhere
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise _not_ours(folder)
    try:
        _lock(file)
    except (BlockingIOError, PermissionError):
        raise _in_use(folder, _holder(file)) from None
    except OSError:  # a file system without locks
        pass
    if (content := _read(file)) and not content.startswith("pid "):
        raise _not_ours(folder)


def _is_in_place(path: Path, file: BinaryIO) -> bool:
    """Return whether `path` still names this open file, and not a newer one."""
    if os.name == "nt":  # Windows does not remove a file that is open
        return True
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _in_use(folder: Path, holder: str) -> RunInUseError:
    return RunInUseError(
        f"out_dir: {folder} is in use by {holder}; a folder has one writer "
        "at a time; wait for that process, stop it or choose another --out_dir"
    )


def _not_ours(folder: Path) -> ResourceError:
    return ResourceError(
        f"out_dir: {folder / '.lock'} is not a lock of this program; "
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
    return _read(file)


def _read(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(100).decode(errors="replace")
