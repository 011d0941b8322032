"""What was worked out once of a large text and is too large for memory: files that are whole, or
not there.

They lie in `hornbook` in the user's folder for such things: $XDG_CACHE_HOME, or else ~/.cache.
Their names say what they were made of, so one that is there is right. Deleting them costs the time
to make them again, no more.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import ResourceError, printable

UNUSED = 30  # days without a use after which a file is removed
ABANDONED = 1  # days after which that which was never completed is


def folder() -> Path:
    """Where it all lies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hornbook")


def recall(name: str, size: int | None = None) -> Path | None:
    """Where the file `name` lies, which counts as a use; None where it is not there, or has not
    `size` bytes.
    """
    path = folder() / name
    if not path.is_file() or size not in (None, path.stat().st_size):
        return None
    with suppress(OSError):  # of a folder that can only be read
        os.utime(path)
    return path


def keep(name: str, size: int, write: Callable[[BinaryIO], object]) -> Path:
    """Have `write` make the file `name`, of `size` bytes; ResourceError where there is no room for
    it.
    """
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        _clean(place)
        if size > (free := shutil.disk_usage(place).free):
            raise OSError(None, f"{free / 1e6:,.1f} MB are free")
        store(place / name, write)
    except OSError as error:
        raise ResourceError(
            f"the cache of large texts: {size / 1e6:,.1f} MB cannot be written to "
            f"{printable(place)} "
            f"({error.strerror}); make room, or set XDG_CACHE_HOME to a folder that has it"
        ) from error
    return place / name


def store(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have `write` make the file `target`, which appears in one step when it is whole and on the
    disk.
    """
    partial = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    try:
        with open(partial, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _clean(place: Path) -> None:
    """Remove what has not been used for long, and what killed processes left."""
    for path in place.iterdir():
        days = ABANDONED if path.suffix == ".part" else UNUSED
        with suppress(OSError):  # of what another process has removed
            if path.stat().st_mtime < time.time() - days * 86400:
                path.unlink()
