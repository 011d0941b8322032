"""What the disk shows before a run starts: texts that are missing, a run folder that is taken.

Nothing here imports torch, so that a mistake is reported at once. The lock of a run folder is held
as long as the run.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from common.console import CheckpointError, ConfigError, ResourceError, say
from common.files import BEST, LAST, expand_home, files_of_run, holds_run, runs_near
from common.messages import first_few
from configs.command import TrainCommand
from data.text import find_sources


def check_paths(command: TrainCommand) -> None:
    """Raise a UserError if the run of a command cannot start; create its folder if necessary.

    A download is not tried, and the sources of a resumed run are those of its checkpoint.
    """
    refuse_to_replace(command)
    if command.mode == "fine-tuned":
        find_checkpoint(command.init_from)
    in_file = {} if command.mode == "resumed" else command.settings_in_file
    settings = in_file | command.overrides
    for option in ("sources", "val_sources"):
        find_sources(settings.get(option, ()), option)
    if os.environ.get("RANK", "0") == "0":  # of several processes, the first one locks
        with locked(command.folder, note=False):  # train.py locks it again, and says that
            pass


def find_checkpoint(path: str | Path) -> Path:
    """Return a checkpoint file; of a run folder the best weights, or the newest if there are none.

    Raises CheckpointError for a path that is neither; it names the runs that exist.
    """
    path = expand_home(path)
    for file in (path / BEST, path / LAST, path):
        if file.is_file():
            return file
    runs = first_few(runs_near(path)) or "none"
    raise CheckpointError(f"{path}: no checkpoint; runs that are there: {runs}")


def refuse_to_replace(command: TrainCommand) -> None:
    """Raise ConfigError if a new run would replace one that is there."""
    if command.mode == "resumed" or command.overwrite or not files_of_run(command.folder):
        return
    fault = "already holds a run; --resume continues it, --overwrite replaces it"
    if not holds_run(command.folder):
        fault = "has a log, but its checkpoints are gone; --overwrite starts anew"
    raise ConfigError(f"out_dir: {command.folder} {fault}, another --out_dir leaves it alone")


def locked(folder: Path, *, note: bool = True) -> AbstractContextManager:
    """Create a run folder if necessary, and lock it; leaving the block unlocks it.

    The system's lock ends with the process, even if that is killed. On a drive without locks, a
    `note` says so. Raises ResourceError if another process has the lock, or for a folder that
    cannot be made or written in.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a soft lock is a file: after a kill, it would lock the folder for every other machine
        return FileLock(folder / ".lock", timeout=0, fallback_to_soft=False).acquire()
    except Timeout:
        raise ResourceError(
            f"out_dir: {folder} is in use by another process; wait for it, stop it or choose "
            "another --out_dir"
        ) from None
    except OSError as error:
        reason = error.strerror
        if error.filename:  # of the folder, or of the file to be locked
            raise ResourceError(f"out_dir: {folder}: {reason}; choose another --out_dir") from error
        if note:
            say(f"note: {folder}: no locks on this drive ({reason}); start one run at a time")
        return nullcontext()
