"""The length of a run that fits into a given time (--minutes)."""

import math
from dataclasses import dataclass, replace

from common.console import ConfigError, say
from common.messages import counted
from configs.schema import Config
from training.state import EVALUATIONS

SAFETY = 0.96  # plan for this fraction of the time that is left, so that the run ends in time
EVALUATION_FRACTION = 0.1  # of the time that is left, at most; at least one evaluation is made


@dataclass(frozen=True)
class Timing:
    """Seconds that the parts of a run take.

    start      from the command to the first step
    step       a step
    samples    the texts that the log draws at an evaluation
    character  the rest of an evaluation, for each character of the validation text
    """

    start: float
    step: float
    samples: float
    character: float


def settings_for_minutes(
    minutes: float, settings: Config, timing: Timing, val_chars: int
) -> Config:
    """Return the settings of the longest run that takes `minutes` at this timing; say its length.

    All evaluations together take at most a tenth of the time. If ten of the whole validation text,
    of `val_chars` characters, do not fit, there are fewer. If not even one fits, it predicts fewer
    characters. Raises ConfigError if there is no time for a step.
    """
    seconds = SAFETY * (60 * minutes - timing.start)
    for_evaluations = EVALUATION_FRACTION * seconds
    # the validation text: as much as the settings say, if there is time to evaluate it once
    wanted = min(val_chars, settings.data.max_val_chars or val_chars)
    # at least half of the tenth is for the text: a shorter text does not shorten the samples
    left = max(for_evaluations - timing.samples, for_evaluations / 2)
    val_chars = min(wanted, max(settings.model.block_size, int(left / timing.character)))
    evaluation = timing.samples + timing.character * val_chars

    evaluations = max(1, min(EVALUATIONS, int(for_evaluations / evaluation)))
    max_iters = int((seconds - evaluations * evaluation) / timing.step)
    if max_iters < 1:
        enough = math.ceil((timing.start + 20 * (timing.step + evaluation)) / 6) / 10
        raise ConfigError(
            f"--minutes={minutes:g} is too short for a start of {timing.start:.1f} s, a step of "
            f"{timing.step:.1f} s and an evaluation of {evaluation:.1f} s; --minutes={enough} "
            "is enough"
        )
    lines = [
        f"--minutes={minutes:g}: {counted(max_iters, 'step')} of {timing.step:.3f} s, "
        f"{counted(evaluations, 'evaluation')} of {evaluation:.1f} s"
    ]
    data = settings.data
    if val_chars < wanted:
        data = replace(data, max_val_chars=val_chars)
        lines[0] += f", with --max_val_chars={val_chars}"
        lines.append("note: losses compare only at the same max_val_chars")
    say(*lines)
    train = replace(
        settings.train, max_iters=max_iters, eval_interval=math.ceil(max_iters / evaluations)
    )
    return replace(settings, data=data, train=train)
