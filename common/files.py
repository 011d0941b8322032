"""Files that are written whole or not at all."""

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import ResourceError

ROOT = Path(__file__).parents[1]  # the folder of the code


def beside_code(path: Path) -> Path:
    """Return a path as it is, or beside the code if there is nothing else.

    So a command works from any folder: python ../hornbook/train.py configs/shakespeare.yaml
    """
    # a file in the current folder comes first
    other = ROOT / path
    return path if os.path.lexists(path) or not os.path.lexists(other) else other


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write `content` to `path`, which has the old or the new bytes at any instant.

    With `previous`, the old file is kept under that name. One of the two is whole at any instant,
    even if the old file is damaged. The folder must have one writer at a time.

    Raises ResourceError if the disk is full or fails; the old files are whole then.
    """
    new, old = unfinished(path), None
    try:
        # the new bytes are on the disk before anything else changes
        with open(new, "wb") as file:
            file.write(content)
            _sync(file)

        # the old file gets a second name; a rename puts the new one in its place
        if previous and path.exists():
            old = unfinished(previous)
            _link_or_copy(path, old)
        _replace(new, path)
        if old:
            _replace(old, previous)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # free the space
            new.unlink()
        raise ResourceError(
            f"{path}: not saved ({error.strerror}); earlier files are intact"
        ) from error


def unfinished(path: Path) -> Path:
    """Return the temporary name of a file while it is written; a killed process leaves it."""
    return path.with_name(f"{path.name}.tmp")


def _sync(file: BinaryIO) -> None:
    # from Python's buffer to the system, then to the disk
    file.flush()
    os.fsync(file.fileno())


def _link_or_copy(path: Path, other: Path) -> None:
    other.unlink(missing_ok=True)  # left by a process that was killed
    try:
        # a second name takes no time and no space
        os.link(path, other)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, other)


def _replace(new: Path, path: Path) -> None:
    """Rename `new` to `path`. Windows denies that while a virus scanner reads one of them: wait."""
    for _ in range(20):
        try:
            return os.replace(new, path)
        except PermissionError:
            time.sleep(0.1)
    os.replace(new, path)


def _sync_folder(folder: Path) -> None:
    """Flush the renames to disk, so that they survive a power failure."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows does not open folders
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # VirtualBox shares and old CIFS sync no folders
            raise
    finally:
        os.close(handle)
