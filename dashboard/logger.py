"""Output of a run: lines and a progress bar on the console, summaries to TensorBoard.

Failed output never ends a run: training continues if the disk is full or a pipe is closed.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from tqdm import tqdm

from checkpointing.checkpoint import DESCRIPTION, METRICS, EventPosition
from common.console import printable
from common.errors import ResourceError
from dashboard import event_file, summaries
from dashboard.metrics import MetricsFile


def info(*lines: object) -> None:
    """Print lines above the progress bar; after standard output has failed, print nothing."""
    try:
        tqdm.write(printable(lines), file=sys.stdout)
        sys.stdout.flush()
    except OSError:
        # the reader of the pipe has exited; training continues
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Logger:
    """The console and TensorBoard output of a run.

    The progress bar appears only on a terminal. If `folder` is None, as on every rank except 0,
    there is neither a bar nor TensorBoard output.
    """

    def __init__(self, folder: Path | None, first_step: int, last_step: int):
        self.folder = folder
        self.events = event_file.EventFile(folder) if folder else None
        self.warned = False  # one warning about a full disk is enough
        self.metrics = None
        if folder:
            with self._warn_about(folder / METRICS):
                self.metrics = MetricsFile(folder / METRICS, first_step)
        self.bar = tqdm(
            total=last_step,
            initial=first_step,
            # short words, so that a terminal of 80 columns has room for the bar itself
            bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
            disable=folder is None or not sys.stderr.isatty(),
        )

    def progress(self, step: int, loss: float, tokens_per_sec: float) -> None:
        """Move the bar to `step`, the number of steps done."""
        with suppress(OSError):
            # set_postfix_str would draw the bar, and update draws it again
            postfix = f"loss {loss:.3f}, {tokens_per_sec:,.0f} char/s"
            self.bar.set_postfix_str(postfix, refresh=False)
            self.bar.update(step - self.bar.n)

    @property
    def is_described(self) -> bool:
        """True if the folder has a description of the run."""
        return self.folder is not None and (self.folder / DESCRIPTION).exists()

    def describe(self, entries: Iterable[Summary]) -> None:
        """Replace the description of the run in TensorBoard."""
        if self.folder:
            try:
                event_file.write_description(self.folder, entries)
            except ResourceError as error:
                self._warn_once(str(error))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log one value per tag, such as train/loss, to TensorBoard and to metrics.csv."""
        # a table for scripts, curves for people
        if self.metrics:
            with self._warn_about(self.metrics.path):
                self.metrics.add(step, values)
        tagged = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.summaries(step, [Summary(value=tagged)])

    def summaries(self, step: int, entries: Iterable[Summary]) -> None:
        """Log texts and pictures to TensorBoard."""
        if self.events:
            for summary in entries:
                self.events.add(summary, step)
            self.flush()

    def warning(self, step: int, tag: str, text: str) -> None:
        """Log a warning to the console and to TensorBoard."""
        info(text)
        self.summaries(step, [summaries.text(tag, text)])

    def sample(self, step: int, text: str, tag: str) -> None:
        """Log generated text to the console and, as a code block, to TensorBoard."""
        block = summaries.code_block(text.split("\n"))
        self.summaries(step, [summaries.text(tag, block)])
        info(*(f"  | {line}" for line in text.strip("\n").split("\n")))

    def flush(self) -> None:
        """Write the buffered events to disk. If that fails, warn once; the next flush retries."""
        if self.events:
            with self._warn_about(self.events.path):
                self.events.flush()

    def position(self) -> EventPosition:
        """Flush; return the current end of the event files, for a checkpoint."""
        self.flush()
        return self.events.position

    def close(self) -> None:
        self.flush()
        with suppress(OSError):
            self.bar.close()

    @contextmanager
    def _warn_about(self, path: Path) -> Iterator[None]:
        """Turn an OSError into a warning."""
        try:
            yield
        except OSError as error:
            self._warn_once(f"{path}: not written ({error.strerror})")

    def _warn_once(self, reason: str) -> None:
        if not self.warned:
            info(f"warning: {reason}; training continues without it")
        self.warned = True
