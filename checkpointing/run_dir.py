"""The folder of a run: whether it may be written, what is in it, and what goes on from where."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkpointing import checkpoint as checkpoints
from checkpointing import file_format
from common.errors import ConfigError, ResourceError, printable
from training.distributed import Ranks
from training.state import Progress, Run

CHECKPOINTS = ("last.pt", "prev.pt", "best.pt")


def holds_run(folder: Path) -> bool:
    """A folder with a checkpoint is a run; anything else in it is not."""
    return any((folder / name).exists() for name in CHECKPOINTS)


def open_folder(
    folder: Path, resume: str | None, overwrite: bool
) -> tuple[Path | None, str | None]:
    """Make the run's folder ready to be written; which checkpoint to go on from, and a line to say,
    if any.

    `resume` is None, "auto" (this folder's own) or the path of a checkpoint or run. ConfigError
    (exit 2) where a run would be overwritten unasked, ResourceError (exit 5) where nothing can be
    written.
    """
    shown = printable(folder)
    source, note = None, None
    if resume == "auto" and not holds_run(folder):
        note = f"nothing to resume in {shown}: starting from the beginning"
    elif resume:
        source, note = checkpoints.resolve(
            folder if resume == "auto" else Path(resume), prefer="last"
        )
        if holds_run(folder) and source.parent.resolve() != folder.resolve():
            raise ConfigError(
                f"out_dir: {shown} holds another run than {printable(source)}; choose another "
                f"--out_dir"
            )
    elif holds_run(folder) and not overwrite:
        raise ConfigError(
            f"out_dir: {shown} holds a run already; --resume goes on with it, --overwrite starts "
            f"afresh in its place, "
            "another --out_dir leaves it alone"
        )
    _probe(folder)
    file_format.remove_stale(folder)
    if source is None:
        _clear(folder)
    return source, note


def check_space(folder: Path, size: int) -> None:
    """ResourceError unless last.pt, prev.pt, best.pt and the one being written, of `size` bytes
    each, find room.
    """
    files = [folder / name for name in CHECKPOINTS if (folder / name).exists()]
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in files)
    needed = (len(CHECKPOINTS) + 1) * size
    if free < needed:
        raise ResourceError(
            f"out_dir: the checkpoints of this run need {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} "
            f"MB are free at "
            f"{printable(folder)}; make room or choose another --out_dir"
        )


def going_on(folder: Path, ranks: Ranks) -> str:
    """The command that goes on with the run in `folder`."""
    words = [
        *ranks.launcher,
        "train.py",
        str(folder / "config.yaml"),
        f"--out_dir={folder}",
        "--resume",
    ]
    return printable(subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words))


def _probe(folder: Path) -> None:
    """Write and remove a file, so that a full or read-only disk is found before hours of
    training.
    """
    probe = folder / f"probe.tmp.{os.getpid()}"
    try:
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ResourceError(
            f"out_dir: cannot write to {printable(folder)} ({error.strerror}); choose another "
            f"--out_dir"
        ) from error


def _clear(folder: Path) -> None:
    """Remove what an earlier run left: its checkpoints and event files, and nothing else."""
    for name in CHECKPOINTS:
        (folder / name).unlink(missing_ok=True)
    for events in folder.glob("events.out.tfevents.*"):
        events.unlink()


class Keeper:
    """Saves a run. Where the disk refuses, it says so, and tries again with the next save.

    `kept` is the progress that last.pt holds; None where it is not there, or not the one that this
    run goes on from.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], kept: Progress | None):
        self.folder, self.say = folder, say
        self.kept = kept and replace(kept)
        self.unsaved_best: bytes | None = None

    def keep(self, run: Run, *, best: bool, last: bool, final: bool) -> None:
        """Save the run as best.pt, as last.pt, or as both; ResourceError only where it is the
        `final` time.

        best.pt comes first, and without it there is no last.pt: what names a best loss has its
        best.pt beside it.
        """
        last = last and run.progress != self.kept
        content = checkpoints.seal(run.checkpoint()) if best or last else None
        if best:
            self.unsaved_best = content
        try:
            if self.unsaved_best is not None:
                file_format.write(self.folder / "best.pt", self.unsaved_best)
                self.unsaved_best = None
            if last:
                file_format.write(
                    self.folder / "last.pt", content, previous=self.folder / "prev.pt"
                )
                self.kept = replace(run.progress)
        except ResourceError as error:
            if final:
                raise
            self.say(f"warning: {error}; training goes on and tries again at the next save")

    def __str__(self) -> str:
        """Where the run can be taken up again, for messages."""
        if self.kept is None:
            return "there is no checkpoint yet"
        last = printable(self.folder / "last.pt")
        return f"the last good checkpoint is {last} of step {self.kept.step:,}"
