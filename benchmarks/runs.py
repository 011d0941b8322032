"""Runs of train.py, and their numbers, from metrics.csv."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np

from storage.log import METRICS


def train(folder: Path, config: str, *options: str) -> None:
    """Run train.py with a config and options; raise CalledProcessError if it fails."""
    command = [sys.executable, "train.py", config, *options, f"--out_dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read_curves(folder: Path, tag: str = "val/loss") -> dict[str, np.ndarray]:
    """Read the rows of metrics.csv that have a `tag`: an array for each column.

    With `val/loss`, these are the evaluations. Losses are in nats per character; `minutes` are
    those since the first step, with evaluations and saves.
    """
    with open(folder / METRICS, encoding="ascii", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[tag]]
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}
