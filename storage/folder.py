"""The run folder: what train.py may replace there, and when a run saves its checkpoints.

A folder with a checkpoint or a log needs --resume or --overwrite. Only --overwrite removes files:
the checkpoints and the log of the earlier run, by their names. A config.yaml of your own is kept.

A kill at any moment leaves whole checkpoints (`files.write_atomic`). The resumed run repeats the
steps since the last save: at most a minute.
"""

import math
import time
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from common import files
from common.console import CheckpointError, ResourceError, say
from configs.command import TrainCommand, to_yaml
from configs.schema import Config
from storage.checkpoint import BEST, LAST, load_checkpoint, make_checkpoint, to_bytes
from training.state import Run

SETTINGS_HEADER = (
    b"# All settings of this run, written by train.py, which replaces a file that begins so.\n"
)
SAVE_SECONDS = 60  # a kill costs a minute of work


def locked(folder: Path) -> AbstractContextManager:
    """Create a run folder if necessary, and lock it; raise ResourceError if another process has.

    The system's lock ends with the process, even if it is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout:
        raise ResourceError(
            f"out_dir: {folder} is in use by another process; a folder has one writer at a time; "
            "wait for that process, stop it or choose another --out_dir"
        ) from None


def write_settings(folder: Path, settings: Config) -> None:
    """Write config.yaml, for people: a resume reads the checkpoint. One of a person stays."""
    path = folder / files.SETTINGS_FILE
    if not path.exists() or path.read_bytes().startswith(SETTINGS_HEADER):
        files.write_atomic(path, SETTINGS_HEADER + to_yaml(settings).encode())


# --------------------------------------------------------------------------------- the checkpoints


class Saver:
    """The writer of a run's checkpoints: the newest state in `last`, the best weights in `best`.

    Making one is the first change in the folder: it writes config.yaml and, to overwrite an earlier
    run, removes its checkpoints and its log. A save that fails, as on a full disk, is a warning,
    and the next one tries again.
    """

    def __init__(self, command: TrainCommand, run: Run):
        command.refuse_to_replace()  # one that has begun since the command was parsed
        self.folder, self.run = command.folder, run
        write_settings(self.folder, run.settings)
        for path in files.files_of_run(self.folder) if command.overwrite else ():
            path.unlink()
        self.attempted_at = -math.inf  # the first save is before the first step
        self.unsaved_best: bytes | None = None  # a best checkpoint that failed to be written

    def save_if_due(self, *, improved: bool, final: bool) -> None:
        """Save the run in `last` at an evaluation, every minute, and if `final`.

        If it has improved, save the weights in `best`. Raises ResourceError only if `final`,
        because no later save will try again.
        """
        progress = self.run.progress
        evaluated = progress.step == progress.last_eval_step
        if not (final or evaluated or time.monotonic() - self.attempted_at >= SAVE_SECONDS):
            return
        self.attempted_at = time.monotonic()
        checkpoint = make_checkpoint(self.run)
        if improved and progress.best_loss <= best_loss_in(self.folder):
            self.unsaved_best = to_bytes(checkpoint.without_moments())
        try:
            # `best` first: a kill between the two must not leave a `last` whose best has no file
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
            files.write_atomic(self.folder / LAST, to_bytes(checkpoint))
        except ResourceError as error:
            if final:
                raise
            say(f"warning: {error}; training continues and retries at the next save")


def best_loss_in(folder: Path) -> float:
    """Return the loss of the best weights in a folder: after a kill, `last` may not know them."""
    try:
        return load_checkpoint(folder / BEST).progress.best_loss
    except CheckpointError:  # there are none, or they are damaged
        return math.inf
