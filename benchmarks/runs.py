"""Runs of train.py, and their numbers, from metrics.csv, event files and checkpoints."""

import csv
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.schema import Config
from storage.checkpoint import LAST, load_checkpoint
from storage.folder import METRICS


@dataclass(frozen=True)
class LossCurve:
    """The losses of a run: arrays with one entry for each evaluation.

    steps        made so far
    minutes      since the first step, with evaluations and saves
    val_loss     exact validation loss, nats per character
    train_loss   the same on parts of the training text
    """

    steps: np.ndarray
    minutes: np.ndarray
    val_loss: np.ndarray
    train_loss: np.ndarray


def train(folder: Path, config: str, *options: str) -> None:
    """Run train.py with a config and options; raise CalledProcessError if it fails."""
    command = [sys.executable, "train.py", config, *options, f"--out_dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read_metrics(folder: Path) -> list[dict[str, str]]:
    """Read the rows of metrics.csv by step; a cell without a value is empty.

    After a kill and a resume, a row may be cut, and some steps are there twice: the last counts.
    """
    rows = {}
    with open(folder / METRICS, encoding="ascii", newline="") as file:
        for row in csv.DictReader(file):
            if None not in row.values():  # a row that is not cut
                rows[int(row["step"]), bool(row["val_loss"])] = row  # a step, or its evaluation
    return [rows[key] for key in sorted(rows)]


def read_loss_curve(folder: Path) -> LossCurve:
    """Read the losses of a run from its metrics.csv."""
    rows = [row for row in read_metrics(folder) if row["val_loss"]]
    columns = ("step", "minutes", "val_loss", "train_loss")
    return LossCurve(*(np.array([float(row[column]) for row in rows]) for column in columns))


def load_events(folder: Path) -> EventAccumulator:
    """Load the event files of a run, with every scalar."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def characters_per_step(config: Config) -> int:
    """Return the characters that one optimization step trains on."""
    train = config.train
    return train.batch_size * train.gradient_accumulation_steps * config.model.block_size


def seconds_in_steps(folder: Path) -> float:
    """Return the time that a run spent in training steps: no evaluations, saves and pauses.

    The log has the speed of each interval, from which the seconds of its steps follow, if their
    windows are full: in a text much longer than the context.
    """
    per_step = characters_per_step(load_checkpoint(folder / LAST).settings)
    speeds = load_events(folder).Scalars("train/chars_per_sec")
    steps = np.diff([0, *(speed.step for speed in speeds)])
    return float(np.sum(per_step * steps / [speed.value for speed in speeds]))
