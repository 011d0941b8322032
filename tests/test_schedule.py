"""The learning rate is a pure function of the step, with the shapes that its names promise."""

import dataclasses
import math
from itertools import pairwise

import pytest

from configs.schema import TrainConfig
from training.schedule import lr_multiplier

SHORT = TrainConfig(max_iters=100, warmup_iters=10, min_lr_ratio=0.1)


def course(**settings):
    train = dataclasses.replace(SHORT, **settings)
    return [lr_multiplier(step, train) for step in range(train.max_iters)]


@pytest.mark.parametrize("schedule", ["cosine", "trapezoid", "constant"])
def test_every_schedule_warms_up_linearly_from_above_zero(schedule):
    rates = course(schedule=schedule)
    assert rates[:10] == [pytest.approx((step + 1) / 11) for step in range(10)]


def test_cosine_is_nanogpts():
    for step, share in list(enumerate(course(schedule="cosine")))[10:]:
        progress = (step - 10) / (100 - 10)
        assert share == pytest.approx(0.1 + 0.5 * (1 + math.cos(math.pi * progress)) * 0.9)


def test_trapezoid_is_flat_and_then_falls_linearly_to_its_least():
    rates = course(schedule="trapezoid", cooldown_iters=20)
    assert set(rates[10:80]) == {1.0}
    falls = [before - after for before, after in pairwise(rates[80:])]
    assert falls == [pytest.approx(0.9 / 20)] * 19
    assert rates[-1] == pytest.approx(0.1 + 0.9 / 20)


def test_constant_stays_at_the_peak():
    assert set(course(schedule="constant")[10:]) == {1.0}


def test_a_run_without_warm_up_begins_at_the_peak():
    for schedule in ("cosine", "trapezoid", "constant"):
        assert course(schedule=schedule, warmup_iters=0)[0] == 1.0
