"""The length of a run that fits into a given time (--minutes)."""

import math
import time
from dataclasses import dataclass, replace

from common.stop import Stop
from configs.schema import TrainConfig
from training.evaluate import evaluate
from training.state import Run
from training.step import TrainStep

WARMUP_STEPS = 2  # not timed, because they allocate memory and compile
MIN_TIMED_STEPS = 3
TIMED_FRACTION = 0.05  # of the given time, spent on timed steps
TARGET = 0.96  # fraction of the time that is left to plan for, so that the run does not exceed it
EVALUATION_FRACTION = 0.1  # at most, of the time that is left; but there is always one evaluation
EVALUATIONS = 10  # of a run with `eval_interval: auto`


@dataclass(frozen=True)
class Speed:
    """Seconds per step and per evaluation."""

    step: float
    evaluation: float


def measure_speed(trial: Run, seconds: float) -> Speed:
    """Time some steps and an evaluation of a run that the caller discards afterwards.

    `seconds` is the time that the real run may take.
    """
    step = TrainStep(trial)
    for _ in range(WARMUP_STEPS):
        step()
    # all ranks must agree on the number of steps
    step_began, count = time.monotonic(), 0
    while count < MIN_TIMED_STEPS or trial.world.any(
        time.monotonic() - step_began < TIMED_FRACTION * seconds
    ):
        step()
        count += 1
    evaluation_began = time.monotonic()
    evaluate(trial, Stop())
    evaluation = time.monotonic() - evaluation_began
    return Speed((evaluation_began - step_began) / count, evaluation)


def fit_to_time(train: TrainConfig, speed: Speed, seconds: float) -> TrainConfig:
    """Return the settings of the longest run of this speed that takes at most TARGET * seconds.

    Evaluations are as many as `eval_interval` asks for, if that takes at most a tenth of the time.
    """
    affordable = max(1, int(EVALUATION_FRACTION * seconds / max(speed.evaluation, 1e-9)))
    wanted = EVALUATIONS
    if train.eval_interval != "auto":
        interval = train.eval_interval * speed.step + speed.evaluation  # seconds
        wanted = math.ceil(TARGET * seconds / interval)
    evaluations = min(affordable, wanted)
    max_iters = max(1, int((TARGET * seconds - evaluations * speed.evaluation) / speed.step))
    if evaluations < wanted:
        train = replace(train, eval_interval=math.ceil(max_iters / evaluations))
    return replace(train, max_iters=max_iters)
