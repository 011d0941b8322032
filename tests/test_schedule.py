"""Learning-rate schedules: pure functions of the step, with the shapes that their names promise."""

import dataclasses
import math

import pytest

from configs.schema import TrainConfig
from train import lr_multiplier, ratio_to_steps

SCHEDULES = ("cosine", "wsd", "constant")


def expected(schedule, step, warmup, cooldown):
    """The multiplier of 100 steps, down to a tenth; the cooldown takes what the warm-up leaves."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "cosine":
        return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warmup) / (100 - warmup))) / 2
    if schedule == "wsd":
        return min(1, 0.1 + 0.9 * (100 - step) / min(cooldown, 100 - warmup))
    return 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "cooldown"), [(10, 20), (30, 100), (50, 90), (100, 100)])
def test_schedule_shape(schedule, warmup, cooldown):
    ratios = {"warmup_ratio": warmup / 100, "cooldown_ratio": cooldown / 100}
    train = TrainConfig(schedule=schedule, max_iters=100, min_lr_ratio=0.1, **ratios)
    for step in range(100):
        multiplier = expected(schedule, step, warmup, cooldown)
        assert lr_multiplier(step, train) == pytest.approx(multiplier)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 0), (1, 0), (0, 1), (1 / 3, 2 / 3)])
def test_schedule_is_positive(schedule, warmup, cooldown):
    """In every step of a run of any length."""
    train = TrainConfig(schedule=schedule, warmup_ratio=warmup, cooldown_ratio=cooldown)
    for max_iters in (1, 2, 3, 7):
        train = dataclasses.replace(train, max_iters=max_iters)
        assert all(0 < lr_multiplier(step, train) <= 1 for step in range(max_iters))


def test_ratio_to_steps_rounds_down():
    """But not by the errors of floats."""
    for n in range(1, 3000):
        assert ratio_to_steps(1 / 70, n) == n // 70 and ratio_to_steps(6 / 7, n) == 6 * n // 7
        assert ratio_to_steps(0.29, 100 * n) == 29 * n and ratio_to_steps(7 / n, n) == 7
    assert (ratio_to_steps(0, 9), ratio_to_steps(1, 9), ratio_to_steps(0.5, 1)) == (0, 9, 0)
