"""Bounded reads and atomic writes."""

import difflib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from errno import EFBIG, EINVAL
from pathlib import Path
from typing import BinaryIO

from common.errors import CheckpointError, ResourceError

ROOT = Path(__file__).parents[1]  # the folder of the code


def beside_code(path: Path) -> Path:
    """Return a path as it is, or, if only there something has this relative path, beside the code.

    So the commands work from any folder: python ../hornbook/train.py configs/shakespeare.yaml
    """
    other = ROOT / path
    return path if os.path.lexists(path) or not os.path.lexists(other) else other


def check_path_spelling(path: str | Path) -> None:
    """Raise CheckpointError if a path does not exist, but one with a similar name does.

    It suggests only folders, and files with the same suffix. It needs no slow imports, so a typo is
    reported at once.
    """
    path, candidates = Path(path), []
    with suppress(OSError):  # for example a name that is too long: loading the path will report it
        if not os.path.lexists(path):
            entries = path.parent.iterdir()
            candidates = [each for each in entries if each.is_dir() or each.suffix == path.suffix]
    near = difflib.get_close_matches(path.name, [each.name for each in candidates], n=1)
    if near:
        raise CheckpointError(
            f"{path}: no such file or folder; did you mean {path.parent / near[0]}?"
        )


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
def atomic_file(path: Path, tag: str | None = None) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an exception.

    Until then it has a unique temporary name, so several processes may write to the same `path`.
    With the process id as `tag`, `remove_stale` finds what a killed process left.
    """
    with _temporary_path(path, tag or os.urandom(8).hex()) as new:
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
        with _temporary_path(path, str(os.getpid())) as new:
            _write_synced(new, content)
            _replace(new, path, previous)
            _sync_folder(path.parent)
    except OSError as error:
        raise ResourceError(
            f"{path}: not saved ({error.strerror}): need {len(content) / 1e6:,.1f} MB, "
            f"{_free_space(path.parent)} at {path.parent}; earlier files are intact; "
            "free some space or choose another --out_dir"
        ) from error


def remove_stale(folder: Path, names: Collection[str]) -> None:
    """Remove the temporary files that dead processes left when they wrote these files."""
    for path in stale_files(folder, names):
        with suppress(OSError):
            path.unlink()


def stale_files(folder: Path, names: Collection[str]) -> list[Path]:
    """Return the temporary files that dead processes left when they wrote these files."""
    found = []
    for path in folder.glob("*.tmp.*"):
        name, _, pid = path.name.rpartition(".tmp.")
        if name in names and re.fullmatch("[0-9]{1,9}", pid) and not _is_running(int(pid)):
            found.append(path)
    return found


@contextmanager
def _temporary_path(path: Path, tag: str) -> Iterator[Path]:
    """Yield a path beside `path` for an unfinished file; remove the file at the end."""
    name = path.with_name(f"{path.name}.tmp.{tag}")
    name.unlink(missing_ok=True)  # left by a dead process with the same pid
    try:
        yield name
    finally:
        with suppress(OSError):
            name.unlink(missing_ok=True)


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
    with _temporary_path(previous, str(os.getpid())) as old:
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


def _is_running(pid: int) -> bool:
    """Return whether another process with this pid is alive."""
    if os.name == "nt":  # where os.kill(pid, 0) would send Ctrl-C
        return False  # safe, because Windows does not remove a file that is open
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return pid != os.getpid()
