"""Learning-rate schedules: pure functions of the step, with the shapes that their names promise."""

import dataclasses
import math
from itertools import pairwise

import pytest

from configs.schema import TrainConfig
from training.schedule import lr_multiplier

SHORT = TrainConfig(max_iters=100, warmup_iters=10, min_lr_ratio=0.1)


def multipliers(**settings):
    train = dataclasses.replace(SHORT, **settings)
    return [lr_multiplier(step, train) for step in range(train.max_iters)]


@pytest.mark.parametrize("warmup_iters", [0, 10])
@pytest.mark.parametrize("schedule", ["cosine", "trapezoid", "constant"])
def test_every_schedule_warms_up_linearly_from_a_positive_value_to_the_peak(schedule, warmup_iters):
    lr = multipliers(schedule=schedule, warmup_iters=warmup_iters, cooldown_iters=40)
    n = warmup_iters + 1
    assert lr[:n] == [pytest.approx((step + 1) / n) for step in range(n)]
    assert schedule != "constant" or set(lr[n:]) == {1.0}


def test_cosine_schedule_is_that_of_nanogpt():
    for step, multiplier in list(enumerate(multipliers(schedule="cosine")))[10:]:
        progress = (step - 10) / (100 - 10)
        assert multiplier == pytest.approx(0.1 + 0.5 * (1 + math.cos(math.pi * progress)) * 0.9)


def test_trapezoid_schedule_is_constant_then_decays_linearly_towards_min_lr():
    lr = multipliers(schedule="trapezoid", cooldown_iters=20)
    assert set(lr[10:80]) == {1.0}
    decreases = [before - after for before, after in pairwise(lr[80:])]
    assert decreases == [pytest.approx(0.9 / 20)] * 19
    assert lr[-1] == pytest.approx(0.1 + 0.9 / 20)
