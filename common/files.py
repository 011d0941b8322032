"""Paths and commands for the user, and files that are written whole or not at all."""

import errno
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from common.console import ResourceError

ROOT = Path(__file__).parents[1]  # the folder of the code
LAST, BEST = "last.safetensors", "best.safetensors"  # the newest state, the best weights
SETTINGS_FILE = "config.yaml"  # of a run
METRICS = "metrics.csv"
EVENT_FILES = "events.out.tfevents.*"  # of TensorBoard


def expand_home(path: str | Path) -> Path:
    """Return a path, in which ~ is the home folder."""
    return Path(os.path.expanduser(path))


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run, which saves a checkpoint before its first step."""
    return any(os.path.exists(folder / name) for name in (LAST, BEST))


def files_of_run(folder: Path) -> list[Path]:
    """Return the files of a run in its folder: the checkpoints and the log."""
    names = (LAST, BEST, METRICS, EVENT_FILES)
    return [path for name in names for path in folder.glob(name)]


def runs_near(path: Path) -> list[str]:
    """Return the run folders that a wrong path may mean: those in it, beside it, and in out."""
    folders = {*path.glob("*"), *path.parent.glob("*"), *Path("out").glob("*")}
    return sorted(str(folder) for folder in folders if holds_run(folder))


def resolve_bundled(path: Path) -> Path:
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
    new = path.with_name(f"{path.name}.tmp")  # a kill leaves it behind, until the next write
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # a run folder may be moved while it trains
        # write the new bytes to the disk before changing anything else
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            try:
                os.fsync(file.fileno())
            except OSError as error:  # some drives cannot, as those of FUSE; the bytes are there
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                    raise
        os.replace(new, path)
    except OSError as error:
        with suppress(OSError):  # free the space
            new.unlink()
        raise ResourceError(
            f"{path}: not saved ({error.strerror}); earlier files are intact"
        ) from error


def shell_command(*words: object) -> str:
    """Join words to a command for the shell."""
    join = subprocess.list2cmdline if os.name == "nt" else shlex.join
    return join([str(word) for word in words])


def script_command(script: str, *arguments: object) -> str:
    """Return the shell command that runs one of our scripts with the Python of this process."""
    path = script if Path.cwd() == ROOT else ROOT / script
    return shell_command(sys.orig_argv[0], path, *arguments)
