"""Picture of docs/dashboard.md, loss curves of good and bad runs: python -m benchmarks.curves

Trains six small models on data/plays with train.py, in about two minutes on two cores, prints their
losses, and draws docs/curves.svg. All have the same validation text, from a play that none reads.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.runs import load_events
from benchmarks.tour import BLUE, GREY, RED, loss_curves, stroke, svg, text

PICTURE = Path(__file__).parent.parent / "docs" / "curves.svg"
PLAYS = sorted((Path(__file__).parent.parent / "data" / "plays").glob("*.txt"))
STEPS, TOP = 200, 5  # the ends of both axes
FIXED = ["--ngram_embeddings=0", "--dtype=float32", "--kernel=sdpa", "--cooldown_iters=auto",
         "--eval_interval=10", "--log=scalars", "--log_interval=2"]  # fmt: skip
WIDTH, HEIGHT, MARGIN = 250, 190, 40  # pixels, of a panel and left of it
COLUMNS = 3


@dataclass(frozen=True)
class Example:
    """A run of configs/fast.yaml with these options, and what it is an example of."""

    title: str
    subtitle: str
    options: tuple[str, ...] = ()
    characters: int = 10**6  # at most, to train on
    steps: int = STEPS


EXAMPLES = [
    Example("Good", "the cooldown starts at step 120"),
    Example(
        "Learning rate 100 times too high",
        "diverges, and never recovers",
        ("--learning_rate=3", "--muon_learning_rate=4"),
    ),
    Example(
        "Learning rate 10 times too high",
        "learns, but loses most of its time",
        ("--learning_rate=0.3", "--muon_learning_rate=0.4"),
    ),
    Example(
        "Learning rate 100 times too low",
        "flat at the end, at a high loss",
        ("--learning_rate=0.0003", "--muon_learning_rate=0.0004"),
    ),
    Example("Too few steps", "still falling at the end", steps=30),
    Example("Too little text", "overfitting on 20,000 characters", characters=20_000),
]


def train(folder: Path, example: Example) -> Path:
    """Train the run of an example, print its losses, and return its folder."""
    folder.mkdir()
    train_text, val_text = folder / "train.txt", folder / "val.txt"
    known = "".join(play.read_text(encoding="utf-8") for play in PLAYS[1:])
    train_text.write_text(known[: example.characters], encoding="utf-8")
    val_text.write_text(PLAYS[0].read_text(encoding="utf-8")[:15_000], encoding="utf-8")
    texts = [f"--data.sources={train_text}", f"--val_sources={val_text}"]
    lengths = [f"--max_iters={example.steps}", f"--warmup_iters={example.steps // 20}"]
    options = [*texts, *FIXED, *lengths, *example.options, f"--out_dir={folder}"]
    command = [sys.executable, "train.py", "configs/fast.yaml", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps, val, known = loss_curves(folder)
    best = val.argmin()
    print(f"{example.title}: best {val[best]:.2f} at step {steps[best]}, "
          f"last {val[-1]:.2f}, on training text {known[-1]:.2f}", flush=True)  # fmt: skip
    return folder


def panel(x: float, y: float, example: Example, folder: Path) -> list[str]:
    """Draw the curves of a run, with the upper left corner of its axes at (x, y)."""
    logged = load_events(folder).Scalars("train/loss")
    steps, val, known = loss_curves(folder)
    shapes = [
        text(x, y - 26, example.title, size=14),
        text(x, y - 10, example.subtitle, color=GREY),
    ]

    def line(steps, losses, color, width, dashed=False):
        heights = y + HEIGHT * (1 - (np.clip(losses, 1, TOP) - 1) / (TOP - 1))
        shapes.append(stroke(x + WIDTH * np.asarray(steps) / STEPS, heights, color, width, dashed))

    for loss in range(1, TOP + 1):
        line([0, STEPS], [loss, loss], "#dddddd", 1)
        shapes.append(text(x - 8, y + HEIGHT * (TOP - loss) / (TOP - 1) + 4, str(loss), 12, "end"))
    for step in range(0, STEPS + 1, 50):
        shapes.append(text(x + WIDTH * step / STEPS, y + HEIGHT + 18, str(step), 12, "middle"))
    line([each.step for each in logged], [each.value for each in logged], "#bbbbbb", 1)
    line(steps, known, RED, 2, dashed=True)
    line(steps, val, BLUE, 2)
    return shapes


def draw(folders: list[Path]) -> str:
    """Draw the panels of all examples, with a legend below: an SVG file as text."""
    shapes = []
    for i, (example, folder) in enumerate(zip(EXAMPLES, folders, strict=True)):
        row, column = divmod(i, COLUMNS)
        x, y = MARGIN + column * (WIDTH + MARGIN), 56 + row * (HEIGHT + 84)
        shapes += panel(x, y, example, folder)
    bottom = 56 + 2 * (HEIGHT + 84) - 28
    legend = [
        ("validation loss", BLUE, 2, False),
        ("loss on training text, evaluated alike", RED, 2, True),
        ("loss of the batches", "#bbbbbb", 1, False),
    ]
    for i, (name, color, width, dashed) in enumerate(legend):
        x = MARGIN + i * (WIDTH + MARGIN)
        shapes.append(stroke([x, x + 24], [bottom, bottom], color, width, dashed))
        shapes.append(text(x + 32, bottom + 4, name))
    return svg(COLUMNS * (WIDTH + MARGIN) + MARGIN, bottom + 20, shapes)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = [train(Path(name) / str(i), example) for i, example in enumerate(EXAMPLES)]
        PICTURE.write_text(draw(folders), encoding="utf-8")


if __name__ == "__main__":
    main()
