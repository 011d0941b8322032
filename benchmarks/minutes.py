"""Loss against minutes: python -m benchmarks.minutes RESULTS [--nanogpt FOLDER]

Trains each of our recipes with `train.py CONFIG --minutes=M` for several M, and draws their losses
over the time of the whole command: docs/pictures/minutes.svg. With a checkout of nanoGPT (see
`benchmarks.time_to_loss`), its CPU recipe is trained too, for the number of steps that fits.

Every run is one line of the file RESULTS, and a run that has a line is not repeated: the same
command resumes an interrupted campaign. The picture and the table show all runs in that file. All
runs take three hours; nothing else should use the machine. `--minutes` and `--configs` select some.
"""

import argparse
from pathlib import Path

from benchmarks.time_to_loss import TrainingResult, run_nanogpt_training, run_training
from benchmarks.tour import BLUE, GREEN, GREY, RED, Line, line_chart
from benchmarks.trials import load_results, run_trial

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "minutes.svg"
MINUTES = (0.5, 1, 2, 5, 10, 30)
NANOGPT, NANOGPT_MINUTES = "nanoGPT", (1, 5, 30)
COLORS = {
    NANOGPT: GREY,
    "configs/fast.yaml": GREEN,
    "configs/shakespeare.yaml": BLUE,
    "configs/best.yaml": RED,
}
CONFIGS = [name for name in COLORS if name != NANOGPT]
TIMED_STEPS = (250, 750)  # of nanoGPT: the lengths of two runs that show its speed


def nanogpt_steps(folder: Path, minutes: float) -> int:
    """Return how many steps of nanoGPT's recipe fit into the time, with start-up and evaluations.

    The time of a run is a linear function of its steps, so two short runs determine it.
    """
    short, long = (run_nanogpt_training(folder, False, n).command_seconds for n in TIMED_STEPS)
    seconds_per_step = (long - short) / (TIMED_STEPS[1] - TIMED_STEPS[0])
    startup = short - TIMED_STEPS[0] * seconds_per_step
    return int((60 * minutes - startup) / seconds_per_step)


def loss_by_minutes(path: Path) -> dict[str, list[tuple[float, TrainingResult]]]:
    """Return the runs of a results file by recipe: pairs of the planned minutes and the result."""
    runs: dict[str, list[tuple[float, TrainingResult]]] = {}
    for (recipe, option), result in load_results(path).items():
        runs.setdefault(recipe, []).append((float(option.removeprefix("--minutes=")), result))
    ordered = [recipe for recipe in COLORS if recipe in runs]
    return {recipe: sorted(runs[recipe], key=lambda run: run[0]) for recipe in ordered}


def draw(runs: dict[str, list[tuple[float, TrainingResult]]]) -> str:
    """Draw the loss of each recipe over the minutes of the whole command: an SVG file as text."""
    lines = [
        Line(
            recipe.removeprefix("configs/"),
            [result.command_seconds / 60 for _, result in pairs],
            [result.loss for _, result in pairs],
            COLORS[recipe],
        )
        for recipe, pairs in runs.items()
    ]
    return line_chart(
        "Validation loss by the time of the whole command, on 2 CPU cores",
        "minutes (logarithmic)",
        "nats per character",
        lines,
        y_ticks=[1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2],
        x_ticks=MINUTES,
        log_x=True,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("results", type=Path, help="JSON Lines file of the runs; may not exist yet")
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT")
    parser.add_argument("--minutes", type=float, nargs="+", default=MINUTES)
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=CONFIGS)
    options = parser.parse_args(arguments)

    def run_nanogpt(_: str, option: str) -> TrainingResult:
        minutes = float(option.removeprefix("--minutes="))
        steps = nanogpt_steps(options.nanogpt, minutes)
        return run_nanogpt_training(options.nanogpt, compiled=False, max_iters=steps)

    for minutes in options.minutes:
        option = f"--minutes={minutes:g}"
        for config in options.configs:
            run_trial(run_training, (config, option), options.results)
        if options.nanogpt and minutes in NANOGPT_MINUTES:
            run_trial(run_nanogpt, (NANOGPT, option), options.results)
    runs = loss_by_minutes(options.results)
    PICTURE.write_text(draw(runs), encoding="utf-8")
    print(
        "| recipe | planned minutes | whole command, minutes | loss |\n| --- | ---: | ---: | ---: |"
    )
    for recipe, pairs in runs.items():
        for planned, result in pairs:
            measured = f"{result.command_seconds / 60:.2f} | {result.loss:.4f}"
            print(f"| {recipe.removeprefix('configs/')} | {planned:g} | {measured} |")


if __name__ == "__main__":
    main()
