"""Learning-rate schedules: pure functions of the step, with the shapes that their names promise."""

import dataclasses
import math

import pytest

from configs.schema import TrainConfig
from train import lr_multiplier, ratio_to_steps

SCHEDULES = {  # of 100 steps, the first 10 of them warm-up, the last 20 cooldown; down to a tenth
    "cosine": lambda step: 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2,
    "wsd": lambda step: min(1, 0.1 + 0.9 * (100 - step) / 20),
    "constant": lambda step: 1,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_shape(schedule):
    train = TrainConfig(
        max_iters=100,
        schedule=schedule,
        warmup_ratio=0.1,
        cooldown_ratio=0.2,
        min_lr_ratio=0.1,
    )
    for step in range(100):
        expected = (step + 1) / 11 if step < 10 else SCHEDULES[schedule](step)
        assert lr_multiplier(step, train) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 0), (1, 0), (0, 1), (1 / 3, 2 / 3)])
def test_schedule_is_positive(schedule, warmup, cooldown):
    """In every step of a run of any length."""
    train = TrainConfig(schedule=schedule, warmup_ratio=warmup, cooldown_ratio=cooldown)
    for max_iters in (1, 2, 3, 7):
        train = dataclasses.replace(train, max_iters=max_iters)
        assert all(0 < lr_multiplier(step, train) <= 1 for step in range(max_iters))


@pytest.mark.parametrize(("warmup", "cooldown"), [(0.3, 1), (0.5, 0.9), (1, 1)])
def test_schedule_of_a_warmup_into_the_cooldown(warmup, cooldown):
    """It rises to the peak, then falls to the end: the cooldown takes what the warm-up leaves."""
    train = TrainConfig(max_iters=100, warmup_ratio=warmup, cooldown_ratio=cooldown)
    multipliers = [lr_multiplier(step, train) for step in range(100)]
    n = round(100 * warmup)
    rise, fall = [(i + 1) / (n + 1) for i in range(n)], [1 - i / (100 - n) for i in range(100 - n)]
    assert multipliers == pytest.approx(rise + fall)


def test_ratio_to_steps_rounds_down():
    """But not by the errors of floats."""
    for n in range(1, 3000):
        assert ratio_to_steps(1 / 70, n) == n // 70 and ratio_to_steps(6 / 7, n) == 6 * n // 7
        assert ratio_to_steps(0.29, 100 * n) == 29 * n and ratio_to_steps(7 / n, n) == 7
    assert (ratio_to_steps(0, 9), ratio_to_steps(1, 9), ratio_to_steps(0.5, 1)) == (0, 9, 0)
