"""The run folder: which files a run may replace there, and how its checkpoints are saved.

The folder may contain other files. Only files that this program wrote are ever replaced or removed.
"""

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path

from filelock import FileLock, Timeout

from checkpointing import checkpoint as checkpoints
from checkpointing import file_format
from checkpointing.checkpoint import (
    BEST,
    DESCRIPTION,
    EVENTS,
    LAST,
    METRICS,
    NO_CHECKPOINT_YET,
    PREV,
    SETTINGS_FILE,
    EventPosition,
)
from common import files
from common.console import print_note
from common.errors import ConfigError, ResourceError, RunInUseError
from configs.schema import Config
from configs.strict_yaml import to_yaml
from training.state import Progress, Run

NO_LOCKS = (ENOLCK, ENOSYS, EOPNOTSUPP)  # what a file system without locks answers
CHECKPOINT_FILES = (LAST, PREV, BEST)
# the files that are written under a temporary name
WRITTEN = (*CHECKPOINT_FILES, DESCRIPTION, SETTINGS_FILE, METRICS, NO_CHECKPOINT_YET)
OWN_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{10})")
SETTINGS_HEADER = (
    "# Written by train.py: all settings of this run. Overwritten by the next run unless edited. "
    "SHA-256 {}\n"
)
AUTO_SAVE_SECONDS = 300
MAX_OWN_FILE = 2**20  # bytes
MARKER_CONTENT = b"written by train.py, which removes it with the first checkpoint\n"


class CheckpointManager:
    """Saves the checkpoints of a run. A failed save is reported, and retried by the next one.

    `notify` prints a line; `event_position` returns the current end of the event files.
    `saved_progress` is the progress in last.safetensors if this run was resumed from that file, and
    None otherwise.
    """

    def __init__(
        self,
        folder: Path,
        notify: Callable[[str], None],
        event_position: Callable[[], EventPosition],
        saved_progress: Progress | None,
    ):
        self.folder, self.notify, self.event_position = folder, notify, event_position
        self.saved_progress = saved_progress and replace(saved_progress)
        self.saved_at = time.monotonic()
        self.unsaved_best: bytearray | None = None

    def save(self, run: Run, *, as_best: bool, final: bool) -> None:
        """Save the run as best.safetensors, and as last.safetensors if that is due or `final`.

        The best one is written first, so a last.safetensors never refers to a best loss that was
        not saved. Raises ResourceError only if `final`.
        """
        as_last = (final or self._is_due(run)) and run.progress != self.saved_progress
        if not (as_best or as_last):
            return
        content = checkpoints.to_bytes(checkpoints.capture(run, self.event_position()))
        if as_best:
            self.unsaved_best = content
        try:
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
            if as_last:
                files.write_atomic(self.folder / LAST, content, previous=self.folder / PREV)
                self.saved_progress = replace(run.progress)
                self.saved_at = time.monotonic()
            if _has_marker(self.folder):
                with suppress(OSError):
                    (self.folder / NO_CHECKPOINT_YET).unlink()
        except ResourceError as error:
            if final:
                raise
            self.notify(f"warning: {error}; training continues and retries at the next save")

    def _is_due(self, run: Run) -> bool:
        """Return whether `save_interval` asks for a save: at the start, then in this interval."""
        progress, interval = run.progress, run.config.train.save_interval
        if interval == "auto":
            evaluated = progress.step == progress.last_eval_step
            return evaluated or time.monotonic() - self.saved_at > AUTO_SAVE_SECONDS
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


def check_run_dir(folder: Path, source: Path | None, overwrite: bool) -> None:
    """Raise ConfigError if a start would mix two runs in a folder, or replace one; change nothing.

    `source` is the checkpoint that the start resumes from, if there is one. Only with `overwrite`
    may a start replace the run in the folder; it never replaces other files.
    """
    in_place = is_in(source, folder)
    if source and holds_run(folder) and not in_place:
        raise ConfigError(
            f"out_dir: {folder} holds a run other than that of {source}; choose another --out_dir"
        )
    if holds_run(folder) and not source and not overwrite:
        raise ConfigError(
            f"out_dir: {folder} already holds a run; --resume continues it, --overwrite "
            "replaces it, another --out_dir leaves it alone"
        )
    if overwrite:
        _check_only_ours(folder)
    events = _all_event_files(folder)
    if events and not (in_place or overwrite or _has_marker(folder)):
        raise ConfigError(
            f"out_dir: {folder} has {len(events)} event files of a run, but no checkpoint; "
            "a new run with --overwrite removes them, another --out_dir leaves them alone"
        )


def _check_only_ours(folder: Path) -> None:
    """Raise ConfigError if a file with the name of a checkpoint was not written by this program."""
    for path in (folder / name for name in CHECKPOINT_FILES):
        if path.is_file():
            head = b"unreadable"
            with suppress(OSError):
                head = files.read_regular(path, file_format.MAX_FILE, only_first=file_format.HEAD)
            if head and not file_format.is_ours(head):
                raise ConfigError(
                    f"out_dir: {path} is not a checkpoint of this program, and --overwrite "
                    "would replace it; move it away, or choose another --out_dir"
                )


def is_in(source: Path | None, folder: Path) -> bool:
    """Return whether the checkpoint to resume from, if there is one, is in this folder."""
    return source is not None and source.parent.resolve() == folder.resolve()


def prepare_run_dir(folder: Path, source: Path | None, config: Config) -> str | None:
    """Remove what an earlier run left, unless it is resumed from `source`; write config.yaml.

    These are the first changes in the folder; if the start fails earlier, it stays as it was.
    Returns the note of `write_settings`. Raises ResourceError if a file cannot be removed or
    written; nothing has been removed if none can be written.
    """
    for path in _unfinished_files(folder):
        with suppress(OSError):
            path.unlink()
    marker, in_place = folder / NO_CHECKPOINT_YET, is_in(source, folder)
    is_new = not in_place and not os.path.lexists(marker)
    if is_new:
        files.write_atomic(marker, MARKER_CONTENT)
    try:
        note = write_settings(folder, config)
    except ResourceError:
        if is_new:
            marker.unlink()
        raise
    if not in_place:
        _remove_earlier_run(folder)
    return note


def event_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the number and path of each event file of this program, except the description."""
    found = []
    for path in folder.glob(EVENTS.partition("{")[0] + "*"):
        match = OWN_EVENTS.fullmatch(path.name)
        if match and stat.S_ISREG(path.lstat().st_mode):
            found.append((int(match[1]), path))
    return found


def write_settings(folder: Path, config: Config) -> str | None:
    """Write the complete settings of a run to config.yaml; raise ResourceError if that fails.

    A file that somebody else wrote or edited is left unchanged; a note is returned then.
    """
    path = folder / SETTINGS_FILE
    if not _may_replace(path):
        return f"{path} was not written by train.py, or has been edited since; it is left unchanged"
    content = to_yaml(config).encode()
    header = SETTINGS_HEADER.format(hashlib.sha256(content).hexdigest())
    files.write_atomic(path, header.encode() + content)
    return None


def _may_replace(path: Path) -> bool:
    """Return whether a file does not exist, or is unchanged since `write_settings` wrote it."""
    try:
        header, _, content = bytes(files.read_regular(path, MAX_OWN_FILE)).partition(b"\n")
    except FileNotFoundError:
        return not path.is_symlink()
    except OSError:
        return False
    digest = hashlib.sha256(content).hexdigest()
    return header + b"\n" == SETTINGS_HEADER.format(digest).encode()


def _unfinished_files(folder: Path) -> list[Path]:
    """Return the temporary files that a killed run left."""
    paths = (files.unfinished(folder / name) for name in WRITTEN)
    return [path for path in paths if path.is_file()]


def _all_event_files(folder: Path) -> list[Path]:
    """Return the event files of this program in a folder, including the description."""
    events = [path for _, path in event_files(folder)]
    return [*events, *filter(Path.is_file, [folder / DESCRIPTION])]


def _remove_earlier_run(folder: Path) -> None:
    """Remove the files of an earlier run."""
    try:
        for path in (*(folder / name for name in CHECKPOINT_FILES), *_all_event_files(folder)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(
            f"{error.filename}: cannot be removed ({error.strerror}); choose another --out_dir"
        ) from error


def _has_marker(folder: Path) -> bool:
    """Return whether a folder has the marker file of a run without a checkpoint."""
    try:
        return files.read_regular(folder / NO_CHECKPOINT_YET, MAX_OWN_FILE) == MARKER_CONTENT
    except OSError:
        return False
