"""Loss against minutes: python -m benchmarks.minutes RESULTS [--nanogpt FOLDER]

Trains each of our recipes with `train.py CONFIG --minutes=M` for several M, prints a table, and
plots the loss against the time of the whole command, in RESULTS with the suffix .svg. With a
checkout of nanoGPT (see `benchmarks.time_to_loss`), its CPU recipe is trained on the same text, for
the number of steps that fits.

Every run is one line of the file RESULTS, and a run that has a line is not repeated: the same
command resumes an interrupted campaign. Delete the lines of a recipe after changing it. Table and
picture show all runs in that file. All runs take three hours, and nothing else should use the
machine meanwhile. `--minutes` and `--configs` select some of them.
"""

import argparse
import functools
import math
from pathlib import Path

from benchmarks.time_to_loss import TrainingResult, run_nanogpt_training, run_training
from benchmarks.tour import BLUE, GREEN, GREY, RED, Line, line_chart
from benchmarks.trials import load_results, run_trial

MINUTES = (0.5, 1, 2, 5, 10, 30)
TICKS = (0.4, 1, 2, 5, 10, 20, 40)  # of the picture, minutes
NANOGPT, NANOGPT_MINUTES = "nanoGPT", (1, 5, 30)
COLORS = {
    NANOGPT: GREY,
    "configs/fast.yaml": GREEN,
    "configs/shakespeare.yaml": BLUE,
    "configs/best.yaml": RED,
}
CONFIGS = [name for name in COLORS if name != NANOGPT]
EVALUATION_STEPS = 250  # nanoGPT evaluates, and saves, at multiples of this number of steps
TIMED_STEPS = (250, 750)  # of the two nanoGPT runs that measure its speed
Runs = dict[str, list[tuple[float, dict[str, float]]]]  # recipe: planned minutes, TrainingResult


@functools.cache
def nanogpt_speed(folder: Path) -> tuple[float, float]:
    """Return the seconds that nanoGPT takes to start, and per step including the evaluations.

    At multiples of EVALUATION_STEPS, the time of a run is a linear function of its steps.
    """
    short, long = (run_nanogpt_training(folder, False, n).command_seconds for n in TIMED_STEPS)
    per_step = (long - short) / (TIMED_STEPS[1] - TIMED_STEPS[0])
    return short - TIMED_STEPS[0] * per_step, per_step


def nanogpt_steps(folder: Path, minutes: float) -> int:
    """Return how many steps of nanoGPT's recipe fit, a multiple of EVALUATION_STEPS.

    nanoGPT only saves at these steps: with others, its last checkpoint would be an earlier one.
    """
    startup, per_step = nanogpt_speed(folder)
    intervals = round((60 * minutes - startup) / per_step / EVALUATION_STEPS)
    return max(1, intervals) * EVALUATION_STEPS


def load_runs(path: Path) -> Runs:
    """Load the runs of a results file, in the order of COLORS and of the planned minutes."""
    runs: Runs = {recipe: [] for recipe in COLORS}
    for (recipe, option), result in load_results(path).items():
        runs[recipe].append((float(option.removeprefix("--minutes=")), result))
    return {
        recipe: sorted(pairs, key=lambda pair: pair[0]) for recipe, pairs in runs.items() if pairs
    }


def draw(runs: Runs) -> str:
    """Plot the losses against the minutes of the whole command: an SVG file as text."""
    lines = [
        Line(
            recipe.removeprefix("configs/"),
            [result["command_seconds"] / 60 for _, result in pairs],
            [result["loss"] for _, result in pairs],
            COLORS[recipe],
            dots=True,
        )
        for recipe, pairs in runs.items()
    ]
    losses = [loss for line in lines for loss in line.y]
    longest = max(minutes for line in lines for minutes in line.x)
    last_tick = min((tick for tick in TICKS if tick >= longest), default=TICKS[-1])
    tenths = range(math.floor(10 * min(losses)), math.ceil(10 * max(losses)) + 1)
    return line_chart(
        "Validation loss by the time of the whole command, on 2 CPU cores",
        "minutes (logarithmic)",
        "nats per character",
        lines,
        y_ticks=[tenth / 10 for tenth in tenths],
        x_ticks=[tick for tick in TICKS if tick <= last_tick],
        log_x=True,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("results", type=Path, help="JSON Lines file of the runs; may not exist yet")
    nanogpt_help = "folder of a checkout of nanoGPT, which is trained for 1, 5 and 30 minutes"
    parser.add_argument("--nanogpt", type=Path, help=nanogpt_help)
    parser.add_argument("--minutes", type=float, nargs="+", choices=MINUTES, default=MINUTES)
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=CONFIGS)
    options = parser.parse_args(arguments)
    text = []
    if options.nanogpt:
        text = [f"--data.sources={options.nanogpt.resolve()}/data/shakespeare_char/input.txt"]

    def run_ours(config: str, option: str) -> TrainingResult:
        return run_training(config, option, *text)

    def run_nanogpt(_: str, option: str) -> TrainingResult:
        steps = nanogpt_steps(options.nanogpt, float(option.removeprefix("--minutes=")))
        return run_nanogpt_training(options.nanogpt, False, steps)

    for minutes in options.minutes:
        option = f"--minutes={minutes:g}"
        for config in options.configs:
            run_trial(run_ours, (config, option), options.results)
        if options.nanogpt and minutes in NANOGPT_MINUTES:
            run_trial(run_nanogpt, (NANOGPT, option), options.results)
    runs = load_runs(options.results)
    options.results.with_suffix(".svg").write_text(draw(runs), encoding="utf-8")
    print("| recipe | planned minutes | whole command, minutes | loss |")
    print("| --- | ---: | ---: | ---: |")
    for recipe, pairs in runs.items():
        for planned, result in pairs:
            measured = f"{result['command_seconds'] / 60:.2f} | {result['loss']:.4f}"
            print(f"| {recipe.removeprefix('configs/')} | {planned:g} | {measured} |")


if __name__ == "__main__":
    main()
