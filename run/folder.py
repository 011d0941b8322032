"""The run folder: what train.py may replace there, and when a run saves its checkpoints.

A folder with a checkpoint needs --resume or --overwrite. A new run replaces the files of an earlier
run, which it knows by their names, and no others. A config.yaml that you wrote is kept too.

A kill at any moment leaves whole checkpoints (`files.write_atomic`). The resumed run repeats the
steps since the last save.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from common import files
from common.console import print_stderr
from common.errors import ResourceError, RunInUseError
from configs.command import to_yaml
from configs.schema import Config
from run import checkpoint as checkpoints
from run.checkpoint import BEST, LAST, PREV
from training.state import Progress, Run

CHECKPOINT_FILES = (LAST, PREV, BEST)
METRICS = "metrics.csv"
EVENT_FILES = "events.out.tfevents.*"  # of TensorBoard
SETTINGS_FILE = "config.yaml"
WRITTEN_BY = b"# Written by train.py"  # a config.yaml that begins so may be replaced
AUTO_SAVE_SECONDS = 300


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Create a run folder if necessary, and lock it until the end of the block.

    If the folder holds no run at the end, what was created is removed again: a start that is
    refused leaves nothing behind. Raises RunInUseError if another process has locked the folder.
    """
    lock_file = folder / ".lock"
    created = [path for path in (lock_file, folder, *folder.parents) if not os.path.lexists(path)]
    folder.mkdir(parents=True, exist_ok=True)
    # the system's lock ends with the process, even if it is killed; a lock file would stay behind
    lock = FileLock(lock_file, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise RunInUseError(
            f"out_dir: {folder} is in use by another process; a folder has one writer at a time; "
            "wait for that process, stop it or choose another --out_dir"
        ) from None
    except OSError as error:
        if error.filename:  # the lock's file cannot be opened
            raise
        # some network drives have no locks, and say so with one errno or another
        print_stderr(f"note: {folder}: no locks on this file system: start one run at a time there")
    try:
        yield
    finally:
        if not holds_run(folder):
            for path in created:
                with suppress(OSError):  # not empty
                    path.unlink() if path == lock_file else path.rmdir()
        lock.release()


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run, which saves a checkpoint before its first step."""
    return any(os.path.exists(folder / name) for name in CHECKPOINT_FILES)


def prepare_folder(folder: Path, resumed: bool, settings: Config) -> None:
    """Write config.yaml; remove the files of an earlier run, unless that run is resumed.

    These are the first changes in the folder: if train.py fails earlier, nothing has changed.
    Raises OSError or ResourceError.
    """
    write_settings(folder, settings)
    # temporary files of saves that were killed
    for name in CHECKPOINT_FILES:
        files.unfinished(folder / name).unlink(missing_ok=True)
    if not resumed:
        earlier_run = [folder / name for name in (*CHECKPOINT_FILES, METRICS)]
        for path in (*earlier_run, *folder.glob(EVENT_FILES)):
            path.unlink(missing_ok=True)


def write_settings(folder: Path, settings: Config) -> None:
    """Write all settings to config.yaml, for people: a resume reads them from the checkpoint.

    A config.yaml that train.py did not write is left unchanged, with a note.
    """
    path = folder / SETTINGS_FILE
    if path.exists() and not path.read_bytes().startswith(WRITTEN_BY):
        print_stderr(f"note: {path} was not written by train.py; it is left unchanged")
        return
    header = WRITTEN_BY + b": all settings of this run. The next run in this folder replaces it.\n"
    files.write_atomic(path, header + to_yaml(settings).encode())


# --------------------------------------------------------------------------------- the checkpoints


class CheckpointManager:
    """The writer of a run's checkpoints: the newest state in `last`, the best weights in `best`.

    A save that fails, as on a full disk, is reported with `notify`; the next one tries again.
    `saved_progress` is the progress in `last`, None for a new run.
    """

    def __init__(
        self,
        folder: Path,
        notify: Callable[[str], None],
        saved_progress: Progress | None,
    ):
        self.folder, self.notify = folder, notify
        # a copy, because the run mutates its progress
        self.saved_progress = saved_progress and replace(saved_progress)
        # time of the latest attempt to save; None: never, so the first save is due
        self.tried_at = time.monotonic() if saved_progress else None
        self.unsaved_best: bytearray | None = None  # a best checkpoint that failed to be written

    def save(self, run: Run, *, as_best: bool, final: bool) -> None:
        """Save the run in `best` if `as_best`, and in `last` if a save is due or `final`.

        Raises ResourceError only if `final`, because no later save will try again.
        """
        as_last = (final or self._is_due(run)) and run.progress != self.saved_progress
        if not (as_best or as_last):
            return
        self.tried_at = time.monotonic()

        # both files get the same bytes
        content = checkpoints.to_bytes(checkpoints.capture(run))
        if as_best:
            self.unsaved_best = content
        try:
            # write best first: otherwise a kill between the two leaves a last whose best_loss has
            # no file; the old last becomes prev
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
            if as_last:
                files.write_atomic(self.folder / LAST, content, previous=self.folder / PREV)
                self.saved_progress = replace(run.progress)
        except ResourceError as error:
            if final:
                raise
            self.notify(f"warning: {error}; training continues and retries at the next save")

    def _is_due(self, run: Run) -> bool:
        """Return whether to save `last`: before the first step, then as `save_interval` says."""
        progress, interval = run.progress, run.config.train.save_interval
        if self.tried_at is None:
            return True
        # at each evaluation, and often enough that a kill costs only minutes
        if interval == "auto":
            evaluated = progress.step == progress.last_eval_step
            return evaluated or time.monotonic() - self.tried_at > AUTO_SAVE_SECONDS
        return progress.step % interval == 0
