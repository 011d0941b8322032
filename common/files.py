"""Bounded reads and atomic writes."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EFBIG, EINVAL
from pathlib import Path
from typing import BinaryIO

from common.errors import CheckpointError, ResourceError, did_you_mean

ROOT = Path(__file__).parents[1]  # the folder of the code


def beside_code(path: Path) -> Path:
    """Return a path as it is, or, if only there something has this relative path, beside the code.

    So the commands work from any folder: python ../hornbook/train.py configs/shakespeare.yaml
    """
    other = ROOT / path
    return path if os.path.lexists(path) or not os.path.lexists(other) else other


def check_path_spelling(path: str | Path) -> None:
    """Raise CheckpointError if a path does not exist, but one with a similar name does.

    It needs no slow imports, so a typo is reported at once.
    """
    hint = "" if os.path.lexists(path) else similar_path(Path(path), otherwise="")
    if hint:
        raise CheckpointError(f"{path}: no such file or folder; {hint}")


def similar_path(path: Path, otherwise: str) -> str:
    """Return "did you mean X?" for the nearest name in the folder of a path, or `otherwise`.

    X is a folder, or a file with the same suffix if the path has one.
    """
    known = {}
    with suppress(OSError):  # for example a name that is too long
        for entry in sorted(path.parent.iterdir())[:1000]:
            if entry.is_dir() or path.suffix in ("", entry.suffix):
                known[entry.name] = str(entry)
    return did_you_mean(path.name, known, otherwise)


def read_regular(path: str | Path, max_bytes: int, only_first: int | None = None) -> bytearray:
    """Read a regular file of at most `max_bytes`, or only its first bytes.

    Raises OSError, whose `strerror` describes the problem. A larger file is an error, and so is a
    pipe or device, because reading it could block or never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(EINVAL, "not a regular file", str(path))
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(EFBIG, f"{size:,} bytes; at most {max_bytes:,} are read", str(path))
        content = bytearray(size if only_first is None else min(size, only_first))
        del content[file.readinto(content) :]
    return content


@contextmanager
def atomic_file(path: Path, shared: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an exception.

    Until then its name is that of `path` with `.tmp`. If several processes may write to the same
    `path`, it is `shared`, and each has a temporary name of its own.
    """
    new = unfinished(path)
    if shared:
        new = new.with_name(f"{new.name}.{os.urandom(8).hex()}")
    with _temporary(new):
        with open(new, "xb") as file:
            yield file
            _sync(file)
        os.replace(new, path)


def write_atomic(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write `content` to `path`, which holds the old or the new bytes at any instant.

    With `previous`, the old file is kept under that name. It replaces `previous` only after the new
    file is in place, so at any instant `path` or `previous` is intact, even if the old file is
    damaged. The folder must have one writer at a time.

    Raises ResourceError if the disk is full or fails; the old files are intact then.
    """
    try:
        new = unfinished(path)
        with _temporary(new):
            _write_synced(new, content)
            _replace(new, path, previous)
            _sync_folder(path.parent)
    except OSError as error:
        raise ResourceError(
            f"{path}: not saved ({error.strerror}): need {len(content) / 1e6:,.1f} MB, "
            f"{_free_space(path.parent)} at {path.parent}; earlier files are intact; "
            "free some space or choose another --out_dir"
        ) from error


def unfinished(path: Path) -> Path:
    """Return the temporary name of a file while it is written; a killed process leaves it."""
    return path.with_name(f"{path.name}.tmp")


@contextmanager
def _temporary(path: Path) -> Iterator[None]:
    """Remove a temporary file before and after the block."""
    path.unlink(missing_ok=True)  # left by a process that was killed
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _replace(new: Path, path: Path, previous: Path | None) -> None:
    if previous is None or not path.exists():
        os.replace(new, path)
        return
    old = unfinished(previous)
    with _temporary(old):
        try:
            os.link(path, old)
        except OSError:  # a file system without hard links
            _write_synced(old, path.read_bytes())
        os.replace(new, path)
        os.replace(old, previous)


def _sync_folder(folder: Path) -> None:
    """Flush the renames to disk, so that they survive a power failure."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows does not open folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB free"
    except OSError:
        return "free space unknown"
