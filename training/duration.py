"""The length of a run that fits into a given time (--minutes)."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.console import say
from common.messages import counted
from configs.schema import Config, TrainConfig
from training.evaluate import evaluate
from training.samples import sample_texts
from training.state import EVALUATIONS, Run

SAFETY = 0.96  # plan for this fraction of the time that is left, so that the run ends in time
EVALUATION_FRACTION = 0.1  # of the time that is left, at most; at least one evaluation is made


@dataclass(frozen=True)
class Timing:
    """Seconds per step and per evaluation."""

    step: float
    evaluation: float


def settings_for_minutes(
    minutes: float,
    began: float,
    settings: Config,
    make_run: Callable[[Config], Run],
    train_step: Callable[[Run], object],
) -> Config:
    """Return the settings of the longest run that ends `minutes` after `began`, and say its length.

    `began` is a time of `time.monotonic`; `make_run` builds a run of some settings, `train_step`
    makes a step of it.
    """
    # A run that is thrown away, to measure this machine, model and text. A million steps: it cannot
    # reach its end, and `dropout: auto`, which takes time, is as large as it can be.
    build_began = time.monotonic()
    probe_run = make_run(replace(settings, train=replace(settings.train, max_iters=10**6)))
    # the real run will take as long to build
    end = began + 60 * minutes - (time.monotonic() - build_began)
    timing = measure_timing(probe_run, train_step, 60 * minutes)
    world = probe_run.world
    del probe_run  # frees its memory

    train = train_config_for(settings.train, timing, end - time.monotonic())
    # every rank must train for the same number of steps, and evaluate at the same ones
    max_iters, eval_interval = map(int, world.all_max(train.max_iters, train.eval_interval))
    train = replace(train, max_iters=max_iters, eval_interval=eval_interval)

    say(
        f"--minutes={minutes:g}: {counted(max_iters, 'step')} of {timing.step:.3f} s, and "
        f"evaluations of {timing.evaluation:.1f} s; a smaller --max_val_chars shortens them"
    )
    return replace(settings, train=train)


def measure_timing(probe_run: Run, train_step: Callable[[Run], object], seconds: float) -> Timing:
    """Time some steps and an evaluation of a run that is discarded afterwards.

    `seconds` is the time that the real run may take. All ranks time the same number of steps.
    """

    def seconds_per_step(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            train_step(probe_run)
        return (time.perf_counter() - began) / count

    seconds_per_step(2)  # not timed, because they allocate memory and compile
    affordable = min(seconds / 20, 30) / seconds_per_step(3)
    step = seconds_per_step(int(probe_run.world.all_max(max(3, affordable))[0]))

    # one evaluation, with what the log draws: all evaluations take equally long
    began = time.perf_counter()
    sample_texts(probe_run, evaluate(probe_run))
    return Timing(step, time.perf_counter() - began)


def train_config_for(train: TrainConfig, timing: Timing, seconds: float) -> TrainConfig:
    """Return the settings of the longest run that takes at most SAFETY * seconds at this timing.

    It evaluates as often as with `eval_interval: auto`, but for at most a tenth of the time.
    """
    seconds *= SAFETY
    affordable = int(EVALUATION_FRACTION * seconds / max(timing.evaluation, 1e-9))
    evaluations = max(1, min(EVALUATIONS, affordable))
    max_iters = max(1, int((seconds - evaluations * timing.evaluation) / timing.step))
    return replace(train, max_iters=max_iters, eval_interval=math.ceil(max_iters / evaluations))
