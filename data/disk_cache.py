"""A disk cache of large encoded texts (see `streaming.LARGE`); entries appear atomically.

The cache is the folder `hornbook` in $XDG_CACHE_HOME or else ~/.cache. An entry's name is derived
from everything that its content depends on. Its last 32 bytes are the SHA-256 of its content, which
is checked when the entry is opened. Deleting an entry costs only the time to make it again.
"""

import hashlib
import os
import shutil
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from common.errors import ResourceError
from common.files import atomic_file

MAX_UNUSED_DAYS = 30
MAX_UNFINISHED_DAYS = 1  # for temporary files that killed processes left
DIGEST_BYTES = 32
CHUNK_BYTES = 2**20  # bytes read at a time to compute a digest


class Entry:
    """The content of an open entry, read in pieces.

    The file is not mapped into memory: if a mapped file fails or is cut short, the system kills the
    process (SIGBUS). Here such a fault raises ResourceError. An entry may be deleted while it is
    open.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size - DIGEST_BYTES

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes, starting at `start`; raise ResourceError if the file lacks them."""
        content = b""
        try:
            os.lseek(self._file, start, os.SEEK_SET)
            while len(content) < count:
                if not (piece := os.read(self._file, count - len(content))):
                    raise OSError(None, "it has been cut short")
                content += piece
        except OSError as error:
            raise ResourceError(
                f"{self.path}: this cached text could not be read "
                f"({error.strerror}); resume the run, which encodes the text again"
            ) from error
        return content

    def is_intact(self) -> bool:
        """Return whether the content has the digest that was stored with it."""
        if self.size < 0:
            return False
        digest = hashlib.sha256()
        for start in range(0, self.size, CHUNK_BYTES):
            digest.update(self.read(start, min(CHUNK_BYTES, self.size - start)))
        return digest.digest() == self.read(self.size, DIGEST_BYTES)


class StoredIds:
    """The ids in an entry. Indexing with a slice reads those ids and returns a NumPy array."""

    def __init__(self, entry: Entry, dtype: np.dtype):
        self.entry, self.dtype = entry, dtype

    def __len__(self) -> int:
        return self.entry.size // self.dtype.itemsize

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, step = index.indices(len(self))
        size = self.dtype.itemsize
        content = self.entry.read(start * size, max(0, stop - start) * size)
        return np.frombuffer(content, self.dtype)[::step]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype)


class _HashingFile:
    """An output file that computes the SHA-256 of everything written to it."""

    def __init__(self, file):
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, content) -> None:
        self.sha256.update(content)
        self.file.write(content)


def folder() -> Path:
    """Return the folder of the cache; raise ResourceError if the user has no home folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        raise ResourceError(
            "the cache of large texts: this process has no home folder; set XDG_CACHE_HOME to a "
            "folder"
        )
    return Path(home, "hornbook")


def get(name: str, size: int | None = None) -> Entry | None:
    """Open an entry and mark it as used; return None unless it exists, has `size` and is intact."""
    path = folder() / name
    try:
        if not path.is_file():  # a pipe would block
            return None
        entry = Entry(path)
        if size not in (None, entry.size) or not entry.is_intact():
            return None
    except (OSError, ResourceError):
        return None
    with suppress(OSError):  # a read-only folder
        os.utime(path)
    return entry


def put(name: str, size: int, write: Callable[[_HashingFile], object]) -> Entry:
    """Make an entry of `size` bytes with `write`; raise ResourceError if there is no space."""
    where = folder()
    try:
        where.mkdir(parents=True, exist_ok=True)
        _remove_old(where)
        if size + DIGEST_BYTES > (free := shutil.disk_usage(where).free):
            raise OSError(None, f"{free / 1e6:,.1f} MB are free")
        with atomic_file(where / name) as file:
            hashing = _HashingFile(file)
            write(hashing)
            file.write(hashing.sha256.digest())
        return Entry(where / name)
    except OSError as error:
        raise ResourceError(
            f"the cache of large texts: {size / 1e6:,.1f} MB cannot be written to "
            f"{where} ({error.strerror}); free some space, or set XDG_CACHE_HOME to a "
            "folder that has it"
        ) from error


def _remove_old(where: Path) -> None:
    """Remove entries that have not been used for a long time, and old unfinished files."""
    for path in where.iterdir():
        days = MAX_UNFINISHED_DAYS if ".tmp." in path.name else MAX_UNUSED_DAYS
        with suppress(OSError):  # another process removed it
            if path.stat().st_mtime < time.time() - days * 86400:
                path.unlink()
