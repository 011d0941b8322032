"""What a run leaves in its folder as it goes: last.pt, the prev.pt before it, and best.pt."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from configs.errors import ResourceError, printable
from training import checkpoint as checkpoints
from training import sealed
from training.run import Progress, Run


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
                sealed.write(self.folder / "best.pt", self.unsaved_best)
                self.unsaved_best = None
            if last:
                sealed.write(self.folder / "last.pt", content, previous=self.folder / "prev.pt")
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
