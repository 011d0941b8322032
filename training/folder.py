"""The folder of a run: whether it may be written, what is in it, and what goes on from where."""

import os
import shutil
from pathlib import Path

from configs.errors import ConfigError, ResourceError, printable
from training import checkpoint as checkpoints


CHECKPOINTS = ("last.pt", "prev.pt", "best.pt")


def holds_run(folder: Path) -> bool:
    """A folder with a checkpoint is a run; anything else in it is not."""
    return any((folder / name).exists() for name in CHECKPOINTS)


def open_folder(folder: Path, resume: str | None, overwrite: bool) -> tuple[Path | None, str | None]:
    """Make the run's folder ready to be written; which checkpoint to go on from, and a line to say, if any.

    `resume` is None, "auto" (this folder's own) or the path of a checkpoint or run. ConfigError (exit 2) where a run
    would be overwritten unasked, ResourceError (exit 5) where nothing can be written.
    """
    shown = printable(folder)
    source, note = None, None
    if resume == "auto" and not holds_run(folder):
        note = f"nothing to resume in {shown}: starting from the beginning"
    elif resume:
        source, note = checkpoints.resolve(folder if resume == "auto" else Path(resume), prefer="last")
        if holds_run(folder) and source.parent.resolve() != folder.resolve():
            raise ConfigError(f"out_dir: {shown} holds another run than {printable(source)}; choose another --out_dir")
    elif holds_run(folder) and not overwrite:
        raise ConfigError(
            f"out_dir: {shown} holds a run already; --resume goes on with it, --overwrite starts afresh in its place, "
            "another --out_dir leaves it alone"
        )
    _probe(folder)
    if overwrite:
        _clear(folder)
    return source, note


def _probe(folder: Path) -> None:
    """Write and remove a file, so that a full or read-only disk is found before hours of training."""
    probe = folder / f"probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ResourceError(
            f"out_dir: cannot write to {printable(folder)} ({error.strerror}); choose another --out_dir"
        ) from None


def check_space(folder: Path, needed: int) -> None:
    """ResourceError unless the disk has room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"out_dir: a checkpoint and its predecessors need {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free at "
            f"{printable(folder)}; free some room or choose another --out_dir"
        )


def _clear(folder: Path) -> None:
    """Remove what an earlier run left: its checkpoints and event files, and nothing else."""
    for name in CHECKPOINTS:
        (folder / name).unlink(missing_ok=True)
    for events in folder.glob("events.out.tfevents.*"):
        events.unlink()
