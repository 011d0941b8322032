"""A disk cache of encoded texts that are too large for memory; entries appear atomically.

It is the folder `hornbook` in $XDG_CACHE_HOME or else ~/.cache. An entry's name is derived from
everything that its content depends on. Deleting entries costs only the time to make them again.
"""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import ResourceError, escape
from common.files import atomic_file

MAX_UNUSED_DAYS = 30
MAX_UNFINISHED_DAYS = 1  # of files that killed processes left


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hornbook")


def get(name: str, size: int | None = None) -> Path | None:
    """Return the path of an entry, and mark it as used; None unless it exists and has `size`."""
    path = folder() / name
    if not path.is_file() or size not in (None, path.stat().st_size):
        return None
    with suppress(OSError):  # a read-only folder
        os.utime(path)
    return path


def put(name: str, size: int, write: Callable[[BinaryIO], object]) -> Path:
    """Make an entry of `size` bytes with `write`; raise ResourceError if there is no space."""
    where = folder()
    try:
        where.mkdir(parents=True, exist_ok=True)
        _remove_old(where)
        if size > (free := shutil.disk_usage(where).free):
            raise OSError(None, f"{free / 1e6:,.1f} MB are free")
        with atomic_file(where / name) as file:
            write(file)
    except OSError as error:
        raise ResourceError(
            f"the cache of large texts: {size / 1e6:,.1f} MB cannot be written to "
            f"{escape(where)} ({error.strerror}); free some space, or set XDG_CACHE_HOME to a "
            "folder that has it"
        ) from error
    return where / name


def _remove_old(where: Path) -> None:
    """Remove entries that were not used for long, and unfinished files."""
    for path in where.iterdir():
        days = MAX_UNFINISHED_DAYS if ".tmp." in path.name else MAX_UNUSED_DAYS
        with suppress(OSError):  # another process removed it
            if path.stat().st_mtime < time.time() - days * 86400:
                path.unlink()
