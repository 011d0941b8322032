"""Loss against minutes: python -m benchmarks.minutes RESULTS [--nanogpt FOLDER]

Trains each of our recipes with `train.py CONFIG --minutes=M` for several M, prints a table, and
plots the loss against the time of the whole command, in RESULTS with the suffix .svg. With a
checkout of nanoGPT (see `benchmarks.time_to_loss`), its CPU recipe is trained on the same text, for
about the number of steps that fits.

Every run is one line of the file RESULTS, and a run that has a line is not repeated: the same
command resumes an interrupted campaign. Delete the lines of a recipe after changing it. Table and
picture show all runs in that file. All runs take 2.3 hours, and nothing else should use the
machine meanwhile. `--minutes` and `--configs` select some of them; `--configs` without a name
trains none of our recipes.
"""

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks import charts
from benchmarks.time_to_loss import TrainingResult, nanogpt_text, run_nanogpt_training, run_training

MINUTES = (0.5, 1, 2, 5, 10, 30)
TICKS = (0.4, 1, 2, 5, 10, 20, 40)  # of the picture, minutes
NANOGPT, NANOGPT_MINUTES = "nanoGPT", (1, 5, 30)
COLORS = {
    NANOGPT: charts.GREY,
    "configs/fast.yaml": charts.GREEN,
    "configs/shakespeare.yaml": charts.BLUE,
}
CONFIGS = [name for name in COLORS if name != NANOGPT]
EVALUATION_STEPS = 250  # nanoGPT evaluates, and saves, at multiples of this number of steps
TIMED_STEPS = (250, 750)  # of the two nanoGPT runs that measure its speed
Runs = dict[str, list[tuple[float, float, float]]]  # recipe: planned minutes, minutes, loss


@functools.cache
def nanogpt_speed(folder: Path) -> tuple[float, float]:
    """Return the seconds that nanoGPT takes to start, and per step including the evaluations.

    At multiples of EVALUATION_STEPS, the time of a run is a linear function of its steps.
    """
    short, long = (run_nanogpt_training(folder, n).command_seconds for n in TIMED_STEPS)
    per_step = (long - short) / (TIMED_STEPS[1] - TIMED_STEPS[0])
    return short - TIMED_STEPS[0] * per_step, per_step


def nanogpt_steps(folder: Path, minutes: float) -> int:
    """Return about how many steps of nanoGPT's recipe fit, a multiple of EVALUATION_STEPS.

    nanoGPT only saves at these steps: with others, its last checkpoint would be an earlier one.
    """
    startup, per_step = nanogpt_speed(folder)
    intervals = round((60 * minutes - startup) / per_step / EVALUATION_STEPS)
    return max(1, intervals) * EVALUATION_STEPS


def read_results(path: Path) -> list[dict]:
    """Read the lines of a results file; without a file there are none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_once(
    train: Callable[[str, str], TrainingResult], recipe: str, option: str, path: Path
) -> None:
    """Train a recipe and append its result to the file, unless it is there."""
    command = [recipe, option]
    if command not in [run["command"] for run in read_results(path)]:
        result = asdict(train(recipe, option))
        with path.open("a") as file:
            file.write(json.dumps({"command": command, **result}) + "\n")


def load_runs(path: Path) -> Runs:
    """Load the runs of a results file, in the order of COLORS and of the planned minutes."""
    runs: Runs = {recipe: [] for recipe in COLORS}
    for run in read_results(path):
        recipe, option = run["command"]
        planned = float(option.removeprefix("--minutes="))
        runs[recipe].append((planned, run["command_seconds"] / 60, run["loss"]))
    return {recipe: sorted(points) for recipe, points in runs.items() if points}


def draw(runs: Runs, path: Path) -> None:
    """Plot the losses against the minutes of the whole command."""
    with charts.picture(path, height=3.2) as axes:
        for recipe, points in runs.items():
            _, minutes, losses = zip(*points, strict=True)
            label = recipe.removeprefix("configs/")
            axes.plot(minutes, losses, "o-", color=COLORS[recipe], label=label)
        charts.log_x(axes, TICKS)
        axes.set_title("Validation loss (nats per character) by the time of the whole command")
        axes.set_xlabel("minutes on 2 CPU cores (logarithmic)")
        axes.legend(loc="upper right")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("results", type=Path, help="JSON Lines file of the runs; may not exist yet")
    nanogpt_help = "folder of a checkout of nanoGPT, which is trained for 1, 5 and 30 minutes"
    parser.add_argument("--nanogpt", type=Path, help=nanogpt_help)
    parser.add_argument("--minutes", type=float, nargs="+", choices=MINUTES, default=MINUTES)
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=CONFIGS)
    options = parser.parse_args(argv)
    text = [nanogpt_text(options.nanogpt)] if options.nanogpt else []

    def run_ours(config: str, option: str) -> TrainingResult:
        return run_training(config, option, *text)

    def run_nanogpt(_: str, option: str) -> TrainingResult:
        steps = nanogpt_steps(options.nanogpt, float(option.removeprefix("--minutes=")))
        return run_nanogpt_training(options.nanogpt, steps)

    for minutes in options.minutes:
        option = f"--minutes={minutes:g}"
        for config in options.configs:
            run_once(run_ours, config, option, options.results)
        if options.nanogpt and minutes in NANOGPT_MINUTES:
            run_once(run_nanogpt, NANOGPT, option, options.results)
    runs = load_runs(options.results)
    draw(runs, options.results.with_suffix(".svg"))
    print("| recipe | planned minutes | whole command, minutes | loss |")
    print("| --- | ---: | ---: | ---: |")
    for recipe, points in runs.items():
        for planned, minutes, loss in points:
            name = recipe.removeprefix("configs/")
            print(f"| {name} | {planned:g} | {minutes:.2f} | {loss:.4f} |")


if __name__ == "__main__":
    main()
