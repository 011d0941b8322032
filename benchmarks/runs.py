"""Loss curves of finished runs, from their event files and checkpoints."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing import checkpoint
from configs.schema import Config


@dataclass(frozen=True)
class LossCurve:
    """The loss of a run over time: arrays with one entry per evaluation.

    seconds     spent in training steps so far; evaluations, saves and pauses do not count
    characters  trained on so far
    losses      exact validation loss, nats per character
    """

    name: str
    seconds: np.ndarray
    characters: np.ndarray
    losses: np.ndarray


def load_events(folder: Path) -> EventAccumulator:
    """Load the event files of a run, with every scalar."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def characters_per_step(config: Config) -> int:
    """Return the characters that one optimization step trains on."""
    train = config.train
    return train.batch_size * train.gradient_accumulation_steps * config.model.block_size


def read_loss_curve(folder: Path) -> LossCurve:
    """Read the loss curve of the run in a folder.

    The log has the speed of each interval, from which the seconds of its steps follow.
    """
    events = load_events(folder)
    per_step = characters_per_step(checkpoint.load(folder / checkpoint.LAST).config)
    speeds, losses = events.Scalars("train/tokens_per_sec"), events.Scalars("val/loss")
    logged_steps = np.array([0, *(each.step for each in speeds)])
    interval_seconds = per_step * np.diff(logged_steps) / [each.value for each in speeds]
    seconds = np.cumsum([0, *interval_seconds])
    evaluated_steps = np.array([each.step for each in losses])
    return LossCurve(
        name=folder.name,
        seconds=np.interp(evaluated_steps, logged_steps, seconds),
        characters=evaluated_steps * per_step,
        losses=np.array([each.value for each in losses]),
    )
