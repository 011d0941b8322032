"""The length of a run that fits into a given time."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from common.signals import Stop
from configs.scaling import scaled_to
from configs.schema import TrainConfig
from training.evaluate import evaluate
from training.state import Run
from training.step import TrainStep

WARMUP_STEPS = 2  # not timed, because they allocate memory and compile
MIN_TIMED_STEPS = 3
TIMED_FRACTION = 0.05  # of the given time, spent on timed steps
TARGET = 0.96  # fraction of the given time to plan for, so that the run does not exceed it
EVALUATION_FRACTION = 0.1  # at most, of the given time; but there is always one evaluation


@dataclass(frozen=True)
class Speed:
    """Seconds per step and per evaluation."""

    step: float
    evaluation: float

    def seconds(self, train: TrainConfig) -> float:
        """Return the time that all steps and evaluations of a run take."""
        return train.max_iters * self.step + train.n_evaluations * self.evaluation


def measure_speed(run: Run, seconds: float, stop: Stop) -> Speed:
    """Time some steps and an evaluation. The caller discards `run` afterwards.

    `seconds` is the time that the real run may take. All ranks must call this function; rank 0
    decides how many steps are timed.
    """
    step = TrainStep(run, notify=lambda line: None)
    for _ in range(WARMUP_STEPS):
        step()
    first = step().seconds
    count = run.world.on_rank_0(max, MIN_TIMED_STEPS, int(TIMED_FRACTION * seconds / first))
    step_began = time.monotonic()
    for _ in range(count):
        step()
    step_seconds = (time.monotonic() - step_began) / count
    evaluation_began = time.monotonic()
    evaluate(run, stop)
    evaluation_seconds = time.monotonic() - evaluation_began
    return Speed(step_seconds, evaluation_seconds)


def fit_to_time(
    train: TrainConfig, given: Mapping[str, object], speed: Speed, seconds: float
) -> TrainConfig:
    """Return the settings of the longest run that takes at most TARGET * seconds.

    It has at least one step. The lengths in `train` are scaled with max_iters (see `scaled_to`),
    but those in `given`, which the user has set, stay.
    """
    max_evaluations = int(EVALUATION_FRACTION * seconds / max(speed.evaluation, 1e-9))
    max_evaluations = max(1, max_evaluations)

    def of_length(max_iters: int) -> TrainConfig:
        return scaled_to(train, given | {"max_iters": max_iters}, max_evaluations)

    low, high = 1, max(2, int(TARGET * seconds / speed.step) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        fits = speed.seconds(of_length(middle)) <= TARGET * seconds
        low, high = (middle, high) if fits else (low, middle)
    return of_length(low)
