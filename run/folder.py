"""The run folder: which files a run may replace there, and how its checkpoints are saved.

A folder with a checkpoint needs --resume or --overwrite. A new run replaces the files that bear the
names of a run's; others, and a config.yaml that somebody else wrote, are left alone.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path

from filelock import FileLock, Timeout

from common import files
from common.console import print_note
from common.errors import ConfigError, ResourceError, RunInUseError
from configs.command import to_yaml
from configs.schema import Config
from run import checkpoint as checkpoints
from run.checkpoint import (
    BEST,
    LAST,
    METRICS,
    PREV,
    SETTINGS_FILE,
)
from training.state import Progress, Run

NO_LOCKS = (ENOLCK, ENOSYS, EOPNOTSUPP)  # what a file system without locks answers
CHECKPOINT_FILES = (LAST, PREV, BEST)
AUTO_SAVE_SECONDS = 300
EVENT_FILES = "events.out.tfevents.*"  # of TensorBoard
WRITTEN_BY = b"# Written by train.py"  # the first line of a config.yaml that may be replaced


class CheckpointManager:
    """Saves the checkpoints of a run. A failed save is reported, and retried by the next one.

    `notify` prints a line; `saved_progress` is the progress in last.safetensors if this run was
    resumed from that file, and None otherwise.
    """

    def __init__(
        self,
        folder: Path,
        notify: Callable[[str], None],
        saved_progress: Progress | None,
    ):
        self.folder, self.notify = folder, notify
        self.saved_progress = saved_progress and replace(saved_progress)
        # of the last save, even if that failed; None: a start begins with one
        self.tried_at = time.monotonic() if saved_progress else None
        self.unsaved_best: bytearray | None = None

    def save(self, run: Run, *, as_best: bool, final: bool) -> None:
        """Save the run as best.safetensors, and as last.safetensors if that is due or `final`.

        The best one is written first, so a last.safetensors never refers to a best loss that was
        not saved. Raises ResourceError only if `final`.
        """
        as_last = (final or self._is_due(run)) and run.progress != self.saved_progress
        if not (as_best or as_last):
            return
        self.tried_at = time.monotonic()
        content = checkpoints.to_bytes(checkpoints.capture(run))
        if as_best:
            self.unsaved_best = content
        try:
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
        """Return whether to save last.safetensors: at the start, then as `save_interval` says."""
        progress, interval = run.progress, run.config.train.save_interval
        if self.tried_at is None:
            return True
        if interval == "auto":
            evaluated = progress.step == progress.last_eval_step
            return evaluated or time.monotonic() - self.tried_at > AUTO_SAVE_SECONDS
        return progress.step % interval == 0


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a run folder, which is created if necessary, until the end of the block.

    The system releases the lock when its process ends, however it ends. Raises RunInUseError if
    another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # not a soft lock, which is a file that a killed process leaves behind
    lock = FileLock(folder / ".lock", timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise RunInUseError(
            f"out_dir: {folder} is in use by another process; a folder has one writer at a time; "
            "wait for that process, stop it or choose another --out_dir"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print_note(f"note: {folder}: this file system has no locks: start one run at a time there")
    try:
        yield
    finally:
        lock.release()


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run, which means that it has a checkpoint."""
    return any(os.path.exists(folder / name) for name in CHECKPOINT_FILES)


def check_folder(folder: Path, source: Path | None, overwrite: bool) -> None:
    """Raise ConfigError if a start would replace a run that it was not told to; change nothing.

    `source` is the checkpoint that the start resumes from, if there is one.
    """
    if holds_run(folder) and not overwrite and not is_in(source, folder):
        raise ConfigError(
            f"out_dir: {folder} already holds a run; --resume continues it, --overwrite "
            "replaces it, another --out_dir leaves it alone"
        )


def is_in(source: Path | None, folder: Path) -> bool:
    """Return whether the checkpoint to resume from, if there is one, is in this folder."""
    return source is not None and source.parent.resolve() == folder.resolve()


def prepare_folder(folder: Path, source: Path | None, config: Config) -> None:
    """Write config.yaml; remove what an earlier run left, unless it is resumed from `source`.

    These are the first changes in the folder: a start that fails earlier leaves it as it was.
    Raises OSError or ResourceError.
    """
    write_settings(folder, config)
    for name in CHECKPOINT_FILES:
        files.unfinished(folder / name).unlink(missing_ok=True)
    if not is_in(source, folder):
        earlier_run = [folder / name for name in (*CHECKPOINT_FILES, METRICS)]
        for path in (*earlier_run, *folder.glob(EVENT_FILES)):
            path.unlink(missing_ok=True)


def write_settings(folder: Path, config: Config) -> None:
    """Write all settings of a run to config.yaml, to read; a resume takes them from the checkpoint.

    A file that train.py has not written is left unchanged, with a note.
    """
    path = folder / SETTINGS_FILE
    if path.exists() and not path.read_bytes().startswith(WRITTEN_BY):
        print_note(f"note: {path} was not written by train.py; it is left unchanged")
        return
    header = WRITTEN_BY + b": all settings of this run. The next run in this folder replaces it.\n"
    files.write_atomic(path, header + to_yaml(config).encode())
