"""The run folder: what train.py may replace there, and when a run saves its checkpoints.

A folder with a checkpoint or a log needs --resume or --overwrite. Only --overwrite removes files:
the checkpoints and the log of the earlier run, by their names. A config.yaml of your own is kept.

A kill at any moment leaves whole checkpoints (`files.write_atomic`). The resumed run repeats the
steps since the last save.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from common import files
from common.console import print_stderr
from common.errors import CheckpointError, ResourceError, RunInUseError
from configs.command import to_yaml
from configs.schema import Config
from storage.checkpoint import BEST, LAST, capture, load_checkpoint, to_bytes
from training.state import Run

METRICS = "metrics.csv"
EVENT_FILES = "events.out.tfevents.*"  # of TensorBoard
SETTINGS_FILE = "config.yaml"
WRITTEN_BY = b"# Written by train.py"  # a config.yaml that begins so may be replaced
# `save_interval: auto` saves after a tenth of the time since the start, but between these seconds,
# and after 50 times what a save takes: a kill costs a tenth of the work, saving 2 % of the time
MIN_SAVE_SECONDS, MAX_SAVE_SECONDS = 15, 300


@contextmanager
def locked(folder: Path) -> Iterator[None]:
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
        # some network drives have no locks, which they report by one errno or another
        print_stderr(f"note: {folder}: no locks on this file system: start one run at a time there")
    try:
        yield
    finally:
        if not files.holds_run(folder):
            for path in created:
                with suppress(OSError):  # not empty
                    path.unlink() if path == lock_file else path.rmdir()
        lock.release()


def logs_in(folder: Path) -> list[Path]:
    """Return the files of a log in a run folder: metrics.csv, and those of TensorBoard."""
    return [path for name in (METRICS, EVENT_FILES) for path in folder.glob(name)]


def prepare_folder(folder: Path, overwrite: bool, settings: Config) -> None:
    """Write config.yaml; to overwrite an earlier run, remove its checkpoints and its log.

    These are the first changes in the folder: if train.py fails earlier, nothing has changed.
    Raises OSError or ResourceError.
    """
    write_settings(folder, settings)
    checkpoints = [folder / name for name in files.CHECKPOINT_FILES]
    unfinished = map(files.unfinished, checkpoints)
    for path in (*unfinished, *(checkpoints + logs_in(folder) if overwrite else ())):
        path.unlink(missing_ok=True)


def write_settings(folder: Path, settings: Config) -> None:
    """Write all settings to config.yaml, for people: a resume reads them from the checkpoint.

    A config.yaml that train.py did not write is left unchanged, with a note.
    """
    path = folder / SETTINGS_FILE
    if path.exists() and not is_ours(path):
        print_stderr(f"note: {path} was not written by train.py; it is left unchanged")
        return
    header = WRITTEN_BY + b": all settings of this run. The next run in this folder replaces it.\n"
    files.write_atomic(path, header + to_yaml(settings).encode())


def is_ours(settings_file: Path) -> bool:
    """Return whether train.py has written a config.yaml."""
    return settings_file.exists() and settings_file.read_bytes().startswith(WRITTEN_BY)


# --------------------------------------------------------------------------------- the checkpoints


class Saver:
    """The writer of a run's checkpoints: the newest state in `last`, the best weights in `best`.

    `already_saved` says that the run has just been restored from `last`. A save that fails, as on a
    full disk, is reported with `notify`; the next one tries again.
    """

    def __init__(
        self, folder: Path, run: Run, notify: Callable[[str], None], *, already_saved: bool
    ):
        self.folder, self.run, self.notify = folder, run, notify
        self.nothing_saved_yet = not already_saved
        # a copy, because the run mutates its progress
        self.saved_progress = replace(run.progress) if already_saved else None
        self.began = self.tried_at = time.monotonic()
        self.save_seconds = 0.0  # of the last save
        self.unsaved_best: bytes | None = None  # a best checkpoint that failed to be written
        # after a kill, `last` may be older than `best`, whose weights worse ones must not replace
        self.best_loss = math.inf
        if (folder / BEST).exists():
            try:
                self.best_loss = load_checkpoint(folder / BEST).progress.best_loss
            except CheckpointError as error:
                notify(f"{error}; the next best weights replace it")

    def save(self, *, as_best: bool, final: bool) -> None:
        """Save the run in `best` if `as_best`, and in `last` if a save is due or `final`.

        `best` keeps its weights if their validation loss is lower. Raises ResourceError or OSError
        only if `final`, because no later save will try again.
        """
        progress = self.run.progress
        as_best = as_best and progress.best_loss <= self.best_loss
        as_last = (final or self._is_due()) and progress != self.saved_progress
        if not (as_best or as_last):
            return
        self.nothing_saved_yet, self.tried_at = False, time.monotonic()

        try:
            if not self.folder.is_dir():
                self._make_folder_again()
                as_last = True
                if not (as_best or self.unsaved_best or final):
                    # the best weights are gone: the next evaluated ones are the best in this folder
                    progress.best_loss = progress.train_loss_at_best = None
            checkpoint = capture(self.run)
            if as_best:
                self.unsaved_best = to_bytes(checkpoint.without_moments())
                self.best_loss = progress.best_loss
            # `best` first: a kill between the two must not leave a `last` whose best has no file
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
            if as_last:
                files.write_atomic(self.folder / LAST, to_bytes(checkpoint))
                self.saved_progress = checkpoint.progress
        except (OSError, ResourceError) as error:
            if final:
                raise
            self.notify(f"warning: {error}; training continues and retries at the next save")
        self.save_seconds = time.monotonic() - self.tried_at

    def _make_folder_again(self) -> None:
        """Make the folder of a run that was moved or deleted while it trains."""
        self.folder.mkdir(parents=True)
        self.best_loss = math.inf
        self.notify(
            f"warning: {self.folder} was moved or deleted, and is made again; the earlier files "
            "are where it was moved to"
        )
        write_settings(self.folder, self.run.settings)

    def _is_due(self) -> bool:
        """Return whether to save `last`: before the first step, then as `save_interval` says."""
        progress, interval = self.run.progress, self.run.settings.train.save_interval
        if self.nothing_saved_yet:
            return True
        if interval != "auto":
            return progress.step % interval == 0
        now = time.monotonic()
        seconds = min(max((now - self.began) / 10, MIN_SAVE_SECONDS), MAX_SAVE_SECONDS)
        seconds = max(seconds, 50 * self.save_seconds)
        return progress.step == progress.last_eval_step or now - self.tried_at >= seconds
