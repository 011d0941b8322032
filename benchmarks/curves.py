"""Picture of docs/dashboard.md, loss curves of good and bad runs: python -m benchmarks.curves

Trains six small models on data/plays with train.py, in about two minutes on two cores, prints their
losses, and draws docs/curves.svg. All have the same validation text, from a play that none reads.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import charts
from benchmarks.runs import LossCurve, read_loss_curve, read_metrics, train

PICTURE = Path(__file__).parent.parent / "docs" / "curves.svg"
PLAYS = sorted((Path(__file__).parent.parent / "data" / "plays").glob("*.txt"))
STEPS, LIMITS = 200, (1, 5)  # of both axes
FIXED = ["--dtype=float32", "--kernel=sdpa", "--eval_interval=10",
         "--log_interval=2"]  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A run of configs/fast.yaml with these options, and what it is an example of."""

    title: str
    subtitle: str
    options: tuple[str, ...] = ()
    characters: int = 10**6  # at most, to train on
    steps: int = STEPS


@dataclass(frozen=True)
class Losses:
    """The losses of a run: of its evaluations, and of its batches."""

    curve: LossCurve
    batch_steps: list[int]
    batch_losses: list[float]


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


def train_example(folder: Path, example: Example) -> Losses:
    """Train the run of an example, print its losses, and return them."""
    folder.mkdir()
    train_text, val_text = folder / "train.txt", folder / "val.txt"
    known = "".join(play.read_text(encoding="utf-8") for play in PLAYS[1:])
    train_text.write_text(known[: example.characters], encoding="utf-8")
    val_text.write_text(PLAYS[0].read_text(encoding="utf-8")[:15_000], encoding="utf-8")
    texts = [f"--sources={train_text}", f"--val_sources={val_text}"]
    lengths = [f"--max_iters={example.steps}", "--warmup_ratio=0.05", "--cooldown_ratio=0.4"]
    train(folder, "configs/fast.yaml", *texts, *FIXED, *lengths, *example.options)
    curve = read_loss_curve(folder)
    best = curve.val_loss.argmin()
    print(
        f"{example.title}: best {curve.val_loss[best]:.2f} at step {curve.steps[best]:.0f}, "
        f"last {curve.val_loss[-1]:.2f}, on training text {curve.train_loss[-1]:.2f}",
        flush=True,
    )
    batches = [row for row in read_metrics(folder) if row["batch_loss"]]
    return Losses(
        curve,
        batch_steps=[int(row["step"]) for row in batches],
        batch_losses=[float(row["batch_loss"]) for row in batches],
    )


def draw(runs: list[Losses], path: Path) -> None:
    """Draw a panel for each example. A loss above LIMITS is drawn at the edge."""
    with charts.picture(path, height=4.6, rows=2, columns=3, sharex=True, sharey=True) as panels:
        for axes, example, run in zip(panels.flat, EXAMPLES, runs, strict=True):
            lines = {
                "validation loss": (run.curve.steps, run.curve.val_loss, charts.BLUE, "-"),
                "on training text, evaluated alike": (
                    run.curve.steps, run.curve.train_loss, charts.RED, "--",
                ),
                "of the batches": (run.batch_steps, run.batch_losses, "#bbbbbb", "-"),
            }  # fmt: skip
            for order, (name, (steps, losses, color, style)) in enumerate(lines.items()):
                losses = np.clip(losses, *LIMITS)
                axes.plot(steps, losses, style, color=color, label=name, zorder=9 - order)
            axes.set_title(f"{example.title}\n{example.subtitle}", fontsize=8)
            axes.set_xticks(range(0, STEPS + 1, 50))
            axes.set_ylim(*LIMITS)
        lines, names = panels[0, 0].get_legend_handles_labels()
        figure = panels[0, 0].figure
        figure.legend(lines, names, loc="outside lower center", ncols=3)


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        runs = [train_example(Path(name) / str(i), example) for i, example in enumerate(EXAMPLES)]
        draw(runs, PICTURE)


if __name__ == "__main__":
    main()
