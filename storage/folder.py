"""The run folder: what train.py may replace there, and when a run saves its checkpoints.

A folder with a checkpoint needs --resume or --overwrite (`checks.refuse_to_replace`). Only
--overwrite removes files: the checkpoints and the log of the earlier run, by their names. A
config.yaml of your own is kept.

A kill at any moment leaves whole checkpoints (`files.write_atomic`). The resumed run repeats the
steps since the last save: at most a minute.
"""

import math
import time
from contextlib import suppress
from pathlib import Path

from common import files
from common.console import CheckpointError, ResourceError, say
from configs.command import TrainCommand, to_yaml
from configs.schema import Config
from storage.checkpoint import BEST, LAST, load_checkpoint, make_checkpoint, to_bytes
from storage.checks import refuse_to_replace
from training.state import Run

SETTINGS_HEADER = b"# All settings of this run. train.py replaces a file that begins so.\n"
SAVE_SECONDS = 60  # a kill costs a minute of work


def write_settings(folder: Path, settings: Config) -> None:
    """Write config.yaml, for people: a resume reads the checkpoint. One of a person stays."""
    path = folder / files.SETTINGS_FILE
    if not path.exists() or path.read_bytes().startswith(SETTINGS_HEADER):
        files.write_atomic(path, SETTINGS_HEADER + to_yaml(settings).encode())


# --------------------------------------------------------------------------------- the checkpoints


class Saver:
    """The writer of a run's checkpoints: the newest state in `last`, the best weights in `best`.

    A save that fails, as on a full disk, is a warning, and the next one tries again.
    """

    def __init__(self, command: TrainCommand, run: Run):
        self.command, self.folder, self.run = command, command.folder, run
        self.unsaved_best: bytes | None = None  # a best checkpoint that failed to be written
        # of `best`; after a kill between the two writes, `last` does not know of it
        self.earlier_best_loss = math.inf
        if command.mode == "resumed":
            with suppress(CheckpointError):  # there is none, or it is damaged
                self.earlier_best_loss = load_checkpoint(self.folder / BEST).progress.best_loss

    def start(self) -> None:
        """Save the run as it starts, remove a run that it overwrites, and write config.yaml."""
        refuse_to_replace(self.command)  # one that has begun since the command was parsed
        overwrite = self.command.overwrite
        self.save(final=overwrite)
        # the earlier run goes only when this one is on the disk
        for path in files.files_of_run(self.folder) if overwrite else ():
            if path.name != LAST:
                path.unlink()
        write_settings(self.folder, self.run.settings)

    @property
    def is_due(self) -> bool:
        """True a minute after the last save, even if that failed."""
        return time.monotonic() - self.attempted_at >= SAVE_SECONDS

    def save(self, *, final: bool = False) -> None:
        """Save the run in `last`, and its weights in `best` if they are the best so far.

        Raises NonFiniteError for weights that are not finite, and ResourceError only if `final`,
        because no later save will try again.
        """
        self.attempted_at = time.monotonic()
        checkpoint, progress = make_checkpoint(self.run), self.run.progress
        if progress.is_best and progress.best_loss < self.earlier_best_loss:
            self.unsaved_best = to_bytes(checkpoint.without_moments())
        try:
            # `best` first: if a kill comes between the two, `last` must not name a best loss whose
            # weights were never written
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
            files.write_atomic(self.folder / LAST, to_bytes(checkpoint))
        except ResourceError as error:
            if final:
                raise
            say(f"warning: {error}; training continues and retries at the next save")
