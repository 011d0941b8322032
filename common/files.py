"""Paths of the user and of runs, and files that are written whole or not at all."""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

from common.errors import ResourceError

WINDOWS = os.name == "nt"
ROOT = Path(__file__).parents[1]  # the folder of the code
CHECKPOINT_FILES = ("last.safetensors", "best.safetensors")  # the newest state, the best weights


def home_path(path: str | Path) -> Path:
    """Return a path, in which ~ is the home folder."""
    return Path(os.path.expanduser(path))


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run, which saves a checkpoint before its first step."""
    return any(os.path.exists(folder / name) for name in CHECKPOINT_FILES)


def runs_in(folder: Path) -> list[str]:
    """Return the run folders in a folder."""
    return sorted(str(path) for path in folder.glob("*") if holds_run(path))


def runs_near(path: Path) -> list[str]:
    """Return the run folders that a wrong path may mean: those in it, beside it, or else in out."""
    return runs_in(path) or runs_in(path.parent) or runs_in(Path("out"))


def beside_code(path: Path) -> Path:
    """Return a path, or that in the folder of the code if it exists only there.

    So a command works from any folder: python ../hornbook/train.py configs/shakespeare.yaml
    """
    other = ROOT / path
    return path if os.path.lexists(path) or not os.path.lexists(other) else other


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that the file has the old or the new bytes at any instant.

    Only one process may write in the folder at a time. Raises ResourceError if the disk is full or
    fails; the old file stays whole.
    """
    new = unfinished(path)
    try:
        # write the new bytes to the disk before changing anything else
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        replace(path, new)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # free the space
            new.unlink()
        raise ResourceError(
            f"{path}: not saved ({error.strerror}); earlier files are intact"
        ) from error


def unfinished(path: Path) -> Path:
    """Return the temporary name of a file that is being written; a kill leaves it behind."""
    return path.with_name(f"{path.name}.tmp")


def replace(path: Path, new: Path) -> None:
    """Rename a file to `path`; on Windows, wait while a virus scanner has the old one open."""
    for _ in range(20 * WINDOWS):
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
