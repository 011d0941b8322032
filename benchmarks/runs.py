"""What the event files and the checkpoint of a finished run say of its pace."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing import checkpoint


@dataclass(frozen=True)
class Course:
    """A run's way: at each evaluation the seconds of training so far, the characters read so far,
    the exact loss.
    """

    name: str
    seconds: np.ndarray
    characters: np.ndarray
    losses: np.ndarray


def course(folder: Path) -> Course:
    """Seconds are those of the steps alone: what evaluations, saves and pauses took does
    not count.
    """
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    config = checkpoint.load(folder / "last.safetensors").config
    a_step = (
        config.train.batch_size * config.train.gradient_accumulation_steps * config.model.block_size
    )
    speeds, losses = events.Scalars("train/tokens_per_sec"), events.Scalars("val/loss")
    steps = np.array([0, *(each.step for each in speeds)])
    seconds = np.cumsum([0, *(a_step * np.diff(steps) / [each.value for each in speeds])])
    evaluated = np.array([each.step for each in losses])
    return Course(
        folder.name,
        np.interp(evaluated, steps, seconds),
        evaluated * a_step,
        np.array([each.value for each in losses]),
    )
