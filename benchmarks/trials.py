"""Losses of a table of settings: python -m benchmarks.trials TABLE [NAME ...] [--results FILE]

TABLE is a JSON file: the command line that all trials share, and the options of each trial.

    {"train.py": ["configs/fast.yaml", "--data.sources=train.txt", "--data.val_sources=held.txt"],
     "trials": {"as it is": [], "momentum 0.9": ["--muon_momentum=0.9"]}}

Trains the named trials, or all of them, and prints a table of their losses. Every run is one line
of the results file, written when the run ends. A run with the same command line as one of these
lines is not repeated, so an interrupted campaign is resumed by the same command. Hold out a part
of the training text to choose settings: the validation text then stays unseen.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpointing.checkpoint import METRICS


@dataclass(frozen=True)
class Result:
    """The exact validation loss at the end of a run, and the minutes from its first step on."""

    loss: float
    minutes: float


def run_training(config: str, *options: str) -> Result:
    """Run train.py with a config and options; read the result from its metrics.csv."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "train.py", config, *options, f"--out_dir={run}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(run / METRICS, newline="") as file:
            last = [row for row in csv.DictReader(file) if row["val_loss"]][-1]
    return Result(float(last["val_loss"]), float(last["minutes"]))


def load_results(path: Path) -> dict[tuple[str, ...], dict[str, float]]:
    """Load the fields of each finished run by its command line; without a file there are none."""
    if not path.exists():
        return {}
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    return {tuple(run.pop("command")): run for run in runs}


def run_trial(run: Callable[..., object], command: tuple[str, ...], path: Path) -> dict[str, float]:
    """Return the fields of a command line's result, from the results file if it is there.

    Otherwise call `run(*command)`, which returns a dataclass, and append its fields to the file.
    """
    results = load_results(path)
    if command not in results:
        results[command] = asdict(run(*command))
        with path.open("a") as file:
            file.write(json.dumps({"command": command, **results[command]}) + "\n")
    return results[command]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("table", type=Path, help="JSON file of the trials")
    parser.add_argument("names", nargs="*", help="trials to run; none: all")
    parser.add_argument("--results", type=Path, help="JSON Lines file; default: TABLE.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    options = parser.parse_args(arguments)
    table = json.loads(options.table.read_text())
    path = options.results or options.table.with_suffix(".jsonl")
    for name in options.names:
        if name not in table["trials"]:
            parser.error(f"{name}: not in {options.table}; allowed: {', '.join(table['trials'])}")
    print("| trial | loss | lowest to highest | minutes |\n| --- | ---: | ---: | ---: |")
    for name in options.names or table["trials"]:
        command = (*table["train.py"], *table["trials"][name])
        runs = [
            run_trial(run_training, (*command, f"--seed={seed}"), path) for seed in options.seeds
        ]
        losses = [run["loss"] for run in runs]
        minutes = statistics.mean(run["minutes"] for run in runs)
        spread = f"{min(losses):.4f} to {max(losses):.4f}"
        print(f"| {name} | {statistics.mean(losses):.4f} | {spread} | {minutes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
