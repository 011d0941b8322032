"""The folder of a run: what may be written there, its checkpoints, and the command to resume."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkpointing import checkpoint as checkpoints
from checkpointing.checkpoint import BEST, LAST, PREV
from common import files
from common.errors import ConfigError, ResourceError, escape
from training.distributed import World
from training.state import Progress, Run

CHECKPOINTS = (LAST, PREV, BEST)
CONFIG = "config.yaml"


class CheckpointManager:
    """Saves the checkpoints of a run. A failed save is reported and made up for by the next.

    `notify` prints a line, `event_position` returns how far the event files are. `saved` is the
    progress in last.safetensors, or None if that does not exist or is not the one that this run
    was resumed from.
    """

    def __init__(
        self,
        folder: Path,
        notify: Callable[[str], None],
        event_position: Callable[[], dict[str, int]],
        saved: Progress | None,
    ):
        self.folder, self.notify, self.event_position = folder, notify, event_position
        self.saved = saved and replace(saved)
        self.unsaved_best: bytearray | None = None

    def save(self, run: Run, *, best: bool, last: bool, final: bool) -> None:
        """Save the run as best, as last, or as both; raise ResourceError only if `final`.

        best.safetensors is written first, so a last.safetensors never refers to a best loss that
        was not saved.
        """
        last = last and run.progress != self.saved
        if not (best or last):
            return
        content = checkpoints.to_bytes(checkpoints.capture(run, self.event_position()))
        if best:
            self.unsaved_best = content
        try:
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
            if last:
                files.write_atomic(self.folder / LAST, content, previous=self.folder / PREV)
                self.saved = replace(run.progress)
        except ResourceError as error:
            if final:
                raise
            self.notify(f"warning: {error}; training continues and retries at the next save")


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run: whether it has a checkpoint."""
    return any((folder / name).exists() for name in CHECKPOINTS)


def prepare_run_dir(
    folder: Path, resume: str | None, overwrite: bool
) -> tuple[Path | None, str | None]:
    """Make the folder ready for a run; return the checkpoint to resume from, and a note, if any.

    `resume` is None, "auto" (from this folder) or the path of a checkpoint or run. Raises
    ConfigError if a run would be overwritten unasked, ResourceError if the folder is not writable.
    """
    shown = escape(folder)
    source, note = None, None
    if resume == "auto" and not holds_run(folder):
        note = f"nothing to resume in {shown}: starting from the beginning"
    elif resume:
        start = folder if resume == "auto" else Path(resume)
        source, note = checkpoints.resolve(start, prefer="last")
        if holds_run(folder) and source.parent.resolve() != folder.resolve():
            raise ConfigError(
                f"out_dir: {shown} holds another run than {escape(source)}; "
                "choose another --out_dir"
            )
    elif holds_run(folder) and not overwrite:
        raise ConfigError(
            f"out_dir: {shown} already holds a run; --resume continues it, --overwrite replaces "
            "it, another --out_dir leaves it alone"
        )
    _check_writable(folder)
    files.remove_stale(folder, (*CHECKPOINTS, CONFIG))
    if source is None:
        _remove_run(folder)
    return source, note


def check_space(folder: Path, checkpoint_bytes: int) -> None:
    """Raise ResourceError unless the disk holds all checkpoints, and the one being written."""
    existing = [folder / name for name in CHECKPOINTS if (folder / name).exists()]
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in existing)
    needed = (len(CHECKPOINTS) + 1) * checkpoint_bytes
    if free < needed:
        raise ResourceError(
            f"out_dir: the checkpoints of this run need {needed / 1e6:,.1f} MB, "
            f"{free / 1e6:,.1f} MB are free at {escape(folder)}; "
            "free some space or choose another --out_dir"
        )


def resume_command(folder: Path, world: World) -> str:
    """Return the command that resumes the run in a folder."""
    words = [*world.launcher, "train.py", str(folder / CONFIG), f"--out_dir={folder}", "--resume"]
    return escape(subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words))


def _check_writable(folder: Path) -> None:
    """Write and remove a file, to find a full or read-only disk before hours of training."""
    probe = folder / f"probe.tmp.{os.getpid()}"
    try:
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ResourceError(
            f"out_dir: cannot write to {escape(folder)} ({error.strerror}); "
            "choose another --out_dir"
        ) from error


def _remove_run(folder: Path) -> None:
    """Remove the checkpoints and event files of an earlier run, and nothing else."""
    for name in CHECKPOINTS:
        (folder / name).unlink(missing_ok=True)
    for events in folder.glob("events.out.tfevents.*"):
        events.unlink()
