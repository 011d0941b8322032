"""A disk cache of large encoded texts (see `text.MIN_CACHED_SIZE`); entries appear atomically.

The cache is the folder `hornbook` in $XDG_CACHE_HOME or else ~/.cache. An entry's name is derived
from everything that its content depends on. Its last 32 bytes are the SHA-256 of its content, which
is checked when the entry is opened. Deleting an entry costs only the time to make it again.
"""

import hashlib
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from common.errors import ResourceError
from common.files import atomic_file

MAX_UNUSED_DAYS = 30
MAX_UNFINISHED_DAYS = 1  # for temporary files that killed processes left
DIGEST_BYTES = 32
CHUNK_BYTES = 2**20  # bytes read at a time to compute a digest


class StoredArray:
    """A one-dimensional array in an entry: indexing with a slice reads that part of it.

    The file is not mapped into memory: if a mapped file fails or is cut short, the system kills the
    process (SIGBUS). Here such a fault raises ResourceError. An entry may be deleted while it is
    open.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self._size = os.fstat(self._file).st_size - DIGEST_BYTES

    def __len__(self) -> int:
        return self._size // self.dtype.itemsize

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        size = self.dtype.itemsize
        content = self._read(start * size, max(0, stop - start) * size)
        return np.frombuffer(content, self.dtype)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype)

    def is_intact(self) -> bool:
        """Return whether the content has the digest that was stored with it."""
        if self._size < 0:
            return False
        digest = hashlib.sha256()
        for start in range(0, self._size, CHUNK_BYTES):
            digest.update(self._read(start, min(CHUNK_BYTES, self._size - start)))
        return digest.digest() == self._read(self._size, DIGEST_BYTES)

    def _read(self, start: int, count: int) -> bytes:
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


def folder() -> Path:
    """Return the folder of the cache; raise ResourceError if the user has no home folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        raise ResourceError(
            "the cache of large texts: this process has no home folder; set XDG_CACHE_HOME to a "
            "folder"
        )
    return Path(home, "hornbook")


def load_or_make(
    name: str, dtype: np.dtype, make: Callable[[], Iterable], size: int = 0
) -> StoredArray:
    """Open an entry, and mark it as used. Unless it exists and is intact, make it first.

    `make` returns the content in pieces, of `size` bytes in all if that is known. Raises
    ResourceError if there is no space.
    """
    path = folder() / name
    with suppress(OSError, ResourceError):
        if path.is_file():  # a pipe would block
            stored = StoredArray(path, dtype)
            if stored.is_intact():
                with suppress(OSError):  # a read-only folder
                    os.utime(path)
                return stored
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(path.parent)
        if size + DIGEST_BYTES > (free := shutil.disk_usage(path.parent).free):
            raise OSError(None, f"{free / 1e6:,.1f} MB are free")
        digest = hashlib.sha256()
        with atomic_file(path, shared=True) as file:
            for piece in make():
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
        return StoredArray(path, dtype)
    except OSError as error:
        raise ResourceError(
            f"the cache of large texts: {size / 1e6:,.1f} MB cannot be written to "
            f"{path.parent} ({error.strerror}); free some space, or set XDG_CACHE_HOME to a "
            "folder that has it"
        ) from error


def _remove_old(where: Path) -> None:
    """Remove entries that have not been used for a long time, and old unfinished files."""
    for path in where.iterdir():
        days = MAX_UNFINISHED_DAYS if ".tmp." in path.name else MAX_UNUSED_DAYS
        with suppress(OSError):  # another process removed it
            if path.stat().st_mtime < time.time() - days * 86400:
                path.unlink()
