"""Loss against compute for six sizes of model: python -m benchmarks.sizes RESULTS

Trains configs/shakespeare.yaml in six widths and depths, each for 1, 4 and 16 minutes, prints a
table, and plots the loss against the compute of the training, in RESULTS with the suffix .svg. All
sizes have the learning rates of the recipe.

Every run is one line of the file RESULTS, and a run that has a line is not repeated: the same
command resumes an interrupted campaign. All runs take 2.1 hours, and nothing else should use the
machine meanwhile. `--minutes` and `--sizes` select some of them; `--minutes` without a number
trains nothing, and only prints and draws.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import charts
from benchmarks.runs import characters_per_step, read_loss_curve, train
from model.gpt import GPT
from model.parameters import parameter_count
from storage.checkpoint import LAST, build_model, load_checkpoint

CONFIG = "configs/shakespeare.yaml"
SIZES = {  # layers x width
    "2x64": (2, 64), "2x128": (2, 128), "3x160": (3, 160),
    "3x256": (3, 256), "4x320": (4, 320), "6x384": (6, 384),
}  # fmt: skip
MINUTES = (1, 4, 16)
HIGHEST_LOSS = 2.0  # in the picture: what has hardly been trained says nothing about its size


@dataclass(frozen=True)
class SizedRun:
    """A run of one size: its planned minutes, what it did in them, its exact validation loss.

    flops  of all training steps: forward and backward passes, without the optimizer
    """

    size: str
    minutes: float
    parameters: int
    steps: int
    flops: float
    loss: float


def flops_per_character(model: GPT) -> float:
    """Return the floating-point operations that training on one character takes.

    A weight in a matrix product takes 2 in the forward pass and 4 in the backward pass; an
    embedding takes none. So does each number of the keys and values that a query attends to: in a
    context of T characters, those of (T + 1) / 2 characters on average.
    """
    config = model.config
    weights = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and "embedding" not in name
    )
    attended = config.n_layer * 2 * config.n_embd * (config.block_size + 1) / 2
    return 6 * (weights + attended)


def train_size(size: str, minutes: float) -> SizedRun:
    """Train a model of a size for some minutes."""
    n_layer, n_embd = SIZES[size]
    options = [f"--n_layer={n_layer}", f"--n_embd={n_embd}", f"--minutes={minutes:g}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        train(folder, CONFIG, *options)
        saved = load_checkpoint(folder / LAST)
        model = build_model(saved)
        steps = saved.progress.step
        characters = steps * characters_per_step(saved.settings)
        return SizedRun(
            size,
            minutes,
            parameters=parameter_count(model),
            steps=steps,
            flops=characters * flops_per_character(model),
            loss=float(read_loss_curve(folder).val_loss[-1]),
        )


def read_results(path: Path) -> list[SizedRun]:
    """Read the lines of a results file; without a file there are none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [SizedRun(**json.loads(line)) for line in lines]


def draw(runs: list[SizedRun], path: Path) -> None:
    """Plot losses below HIGHEST_LOSS against the compute, for each size, and the lowest of all."""
    runs = sorted((run for run in runs if run.loss < HIGHEST_LOSS), key=lambda run: run.flops)
    if not runs:
        return
    grid = np.geomspace(runs[0].flops, runs[-1].flops, num=200)
    lowest = np.full_like(grid, np.inf)
    with charts.picture(path, height=3.2) as axes:
        for number, size in enumerate(SIZES):
            of_size = [run for run in runs if run.size == size]
            if of_size:
                flops, losses = [run.flops for run in of_size], [run.loss for run in of_size]
                label = f"{of_size[0].parameters / 1e6:.1f} million"
                color = charts.color_of(number, len(SIZES))
                axes.plot(flops, losses, "o-", color=color, label=label)
                # between the points of a size, on the lines that are drawn
                line = np.interp(np.log(grid), np.log(flops), losses, left=np.inf, right=np.inf)
                lowest = np.minimum(lowest, line)
        axes.plot(
            grid,
            np.minimum.accumulate(lowest),
            color="#cccccc",
            linewidth=6,
            zorder=1,
            label="lowest",
        )
        axes.set_xscale("log")
        axes.set_title("Validation loss (nats per character) by the compute of the training")
        axes.set_xlabel("floating-point operations (logarithmic)")
        axes.legend(title="parameters", loc="upper left", bbox_to_anchor=(1, 1))  # outside


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("results", type=Path, help="JSON Lines file of the runs; may not exist yet")
    parser.add_argument("--minutes", type=float, nargs="*", default=MINUTES)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args(argv)
    for minutes in options.minutes:
        for size in options.sizes:
            done = {(run.size, run.minutes) for run in read_results(options.results)}
            if (size, minutes) not in done:
                run = train_size(size, minutes)
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
    runs = read_results(options.results)
    draw(runs, options.results.with_suffix(".svg"))
    print("| layers x width | parameters | minutes | steps | operations | loss |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for run in runs:
        print(
            f"| {run.size} | {run.parameters:,} | {run.minutes:g} | {run.steps:,} | "
            f"{run.flops:.1e} | {run.loss:.4f} |"
        )


if __name__ == "__main__":
    main()
