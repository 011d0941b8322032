"""What a run says: curves, texts and pictures to TensorBoard, lines and a progress bar to the
terminal.

None of it can stop a run: where the disk is full or nobody reads any more, the run goes on without.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from tqdm import tqdm

from common.errors import printable
from dashboard import summaries
from dashboard.event_file import EventFile, is_introduced


def say(line: str) -> None:
    """A line for people, above the bar; where the reader of the output has gone, nothing from now
    on.
    """
    try:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Silence:
    """The monitor of a rank that has nothing to say because the first says it."""

    def introduce(self, summaries: Sequence[Summary]) -> None: ...
    def progress(self, step: int, loss: float, speed: float) -> None: ...
    def scalars(self, step: int, values: dict[str, float]) -> None: ...
    def show(self, step: int, summaries: Iterable[Summary]) -> None: ...
    def notice(self, step: int, tag: str, words: str) -> None: ...
    def sample(self, step: int, text: str) -> None: ...
    def close(self) -> None: ...


class Monitor:
    """One voice for a run. Without a terminal the bar is left out and the lines remain."""

    def __init__(self, folder: Path, first_step: int, last_step: int):
        self.events = EventFile(folder)
        self.warned = False
        self.bar = tqdm(
            total=last_step, initial=first_step, unit="step", disable=not sys.stderr.isatty()
        )

    def progress(self, step: int, loss: float, speed: float) -> None:
        """Move the bar to `step`, the number of steps done; `speed` is in characters per second."""
        with suppress(OSError):
            self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} characters/s", refresh=False)
            self.bar.update(step - self.bar.n)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Tag by tag, such as train/loss, to TensorBoard."""
        self.events.add(
            Summary(value=[Summary.Value(tag=tag, simple_value=values[tag]) for tag in values]),
            step,
        )
        self.flush()

    def introduce(self, summaries: Sequence[Summary]) -> None:
        """What the run is, to TensorBoard, in the place of what was said of it before."""
        if not is_introduced(self.events.path.parent, summaries):
            self.show(0, summaries)

    def show(self, step: int, summaries: Iterable[Summary]) -> None:
        """Texts and pictures, to TensorBoard."""
        for each in summaries:
            self.events.add(each, step)
        self.flush()

    def notice(self, step: int, tag: str, words: str) -> None:
        """Something odd, once and in plain words, to the terminal and to TensorBoard."""
        say(words)
        self.show(step, [summaries.text(tag, words)])

    def sample(self, step: int, text: str) -> None:
        """A generated text, to the terminal and, as Markdown that changes nothing in it, to
        TensorBoard.
        """
        self.show(step, [summaries.text("samples/text", summaries.verbatim(text.split("\n")))])
        say("\n".join(f"  | {printable(line)}" for line in text.strip("\n").split("\n")))

    def flush(self) -> None:
        """Bring what was written to the disk; where that fails, one warning, and another attempt
        with the next.
        """
        try:
            self.events.flush()
        except OSError as error:
            if not self.warned:
                say(
                    f"warning: {printable(self.events.path)}: TensorBoard's file cannot be written "
                    f"({error.strerror}); training goes on"
                )
            self.warned = True

    def close(self) -> None:
        self.flush()
        with suppress(OSError):
            self.bar.close()
