"""Learning-rate schedules: pure functions of the step, with the shapes that their names promise."""

import dataclasses
import math
from itertools import pairwise

import pytest

from configs.schema import TrainConfig
from training.schedule import lr_multiplier, ratio_to_steps

SHORT = TrainConfig(max_iters=100, warmup_ratio=0.1, min_lr_ratio=0.1)


def multipliers(**settings):
    train = dataclasses.replace(SHORT, **settings)
    return [lr_multiplier(step, train) for step in range(train.max_iters)]


@pytest.mark.parametrize("schedule", ["cosine", "trapezoid", "constant"])
def test_every_schedule_warms_up_linearly_from_a_positive_value_to_the_peak(schedule):
    lr = multipliers(schedule=schedule, cooldown_ratio=0.4)
    assert lr[:11] == [pytest.approx((step + 1) / 11) for step in range(11)]
    assert schedule != "constant" or set(lr[11:]) == {1.0}


def test_cosine_schedule_is_that_of_nanogpt():
    for step, multiplier in list(enumerate(multipliers(schedule="cosine")))[10:]:
        progress = (step - 10) / (100 - 10)
        assert multiplier == pytest.approx(0.1 + 0.5 * (1 + math.cos(math.pi * progress)) * 0.9)


def test_trapezoid_schedule_is_constant_then_decays_linearly_towards_min_lr():
    lr = multipliers(schedule="trapezoid", cooldown_ratio=0.2)
    assert set(lr[10:80]) == {1.0}
    decreases = [before - after for before, after in pairwise(lr[80:])]
    assert decreases == [pytest.approx(0.9 / 20)] * 19
    assert lr[-1] == pytest.approx(0.1 + 0.9 / 20)


@pytest.mark.parametrize("schedule", ["cosine", "trapezoid", "constant"])
@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 0), (1, 0), (0, 1), (1 / 3, 2 / 3)])
def test_a_run_of_any_length_has_a_positive_learning_rate_in_every_step(schedule, warmup, cooldown):
    shares = {"warmup_ratio": warmup, "cooldown_ratio": cooldown, "min_lr_ratio": 0}
    for max_iters in (1, 2, 3, 7):
        lr = multipliers(schedule=schedule, max_iters=max_iters, **shares)
        assert len(lr) == max_iters and all(0 < multiplier <= 1 for multiplier in lr)


def test_a_share_of_the_steps_is_rounded_down_but_not_by_the_errors_of_floats():
    for n in range(1, 3000):
        assert ratio_to_steps(1 / 70, n) == n // 70 and ratio_to_steps(6 / 7, n) == 6 * n // 7
        assert ratio_to_steps(0.29, 100 * n) == 29 * n and ratio_to_steps(7 / n, n) == 7
    assert (ratio_to_steps(0, 9), ratio_to_steps(1, 9), ratio_to_steps(0.5, 1)) == (0, 9, 0)
