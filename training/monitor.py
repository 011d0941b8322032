"""What a run says: scalars and samples to TensorBoard, lines and a progress bar to the terminal."""

import sys
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from configs.errors import printable


class Monitor:
    """One voice for a run. Without a terminal the bar is left out and the lines remain."""

    def __init__(self, folder: Path, first_step: int, last_step: int):
        self.writer = SummaryWriter(folder, purge_step=first_step + 1)
        self.bar = tqdm(total=last_step, initial=first_step, unit="step", disable=not sys.stderr.isatty())

    def say(self, line: str = "") -> None:
        """A line for people, above the bar."""
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def progress(self, step: int, loss: float, speed: float) -> None:
        """Move the bar to `step`, the number of steps done; `speed` is in characters per second."""
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} characters/s", refresh=False)
        self.bar.update(step - self.bar.n)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Tag by tag, such as train/loss, to TensorBoard."""
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)

    def sample(self, step: int, text: str) -> None:
        """A generated text, to the terminal and, as Markdown that changes nothing in it, to TensorBoard."""
        self.writer.add_text("samples/text", "".join(f"    {line}\n" for line in text.split("\n")), step)
        self.say("\n".join(f"  | {printable(line)}" for line in text.strip("\n").split("\n")))

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.bar.close()
        self.writer.close()
