"""The length of a run that fits into a given time (--minutes)."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.stop import Stop
from configs.schema import Config, TrainConfig
from training.evaluate import evaluate
from training.samples import write_texts
from training.state import EVALUATIONS, Run
from training.step import train_step

SAFETY = 0.96  # plan for this fraction of the time that is left, so that the run ends in time
EVALUATION_FRACTION = 0.1  # of the time that is left, at most; at least one evaluation is made


@dataclass(frozen=True)
class Timing:
    """Seconds per step and per evaluation."""

    step: float
    evaluation: float


def settings_for_minutes(
    minutes: float, began: float, settings: Config, make_run: Callable[[Config], Run]
) -> tuple[Config, Timing]:
    """Return the settings of the longest run that ends `minutes` after `began`, and its timing.

    `began` is a time of `time.monotonic`; `make_run` builds a run of some settings.
    """
    # A run that is thrown away, to measure this machine, model and text. A million steps: it cannot
    # reach its end, and `dropout: auto`, which takes time, is as large as it can be.
    build_began = time.monotonic()
    probe_run = make_run(replace(settings, train=replace(settings.train, max_iters=10**6)))
    # the real run will take as long to build
    end = began + 60 * minutes - (time.monotonic() - build_began)
    timing = measure_timing(probe_run, 60 * minutes)
    world = probe_run.world
    del probe_run  # frees its memory

    train = longest_run(settings.train, timing, end - time.monotonic())
    # every rank must train for the same number of steps, and evaluate at the same ones
    max_iters, eval_interval = map(int, world.max(train.max_iters, train.eval_interval))
    train = replace(train, max_iters=max_iters, eval_interval=eval_interval)
    return replace(settings, train=train), timing


def measure_timing(probe_run: Run, seconds: float) -> Timing:
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
    step = seconds_per_step(int(probe_run.world.max(max(3, affordable))[0]))

    # one evaluation, with what the log draws: all evaluations take equally long
    began = time.perf_counter()
    write_texts(probe_run, evaluate(probe_run, Stop()))  # a flag that nothing sets
    return Timing(step, time.perf_counter() - began)


def longest_run(train: TrainConfig, timing: Timing, seconds: float) -> TrainConfig:
    """Return the settings of the longest run that takes at most SAFETY * seconds at this timing.

    It evaluates as often as `eval_interval` asks, but for at most a tenth of the time.
    """
    seconds *= SAFETY
    interval, evaluations = 1, EVALUATIONS
    if train.eval_interval != "auto":
        interval = train.eval_interval
        evaluations = math.ceil(seconds / (interval * timing.step + timing.evaluation))
    affordable = int(EVALUATION_FRACTION * seconds / max(timing.evaluation, 1e-9))
    evaluations = max(1, min(evaluations, affordable))

    max_iters = max(1, int((seconds - evaluations * timing.evaluation) / timing.step))
    interval = max(interval, math.ceil(max_iters / evaluations))
    return replace(train, max_iters=max_iters, eval_interval=interval)
