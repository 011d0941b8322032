"""Learning-rate schedules: pure functions of the step, with the shapes that their names promise."""

import math

import pytest

from configs.schema import TrainConfig
from train import lr_multiplier


def expected(schedule, step, warmup, cooldown):
    """The multiplier of 100 steps, down to a tenth; the cooldown takes what the warm-up leaves."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "cosine":
        return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warmup) / (100 - warmup))) / 2
    if schedule == "wsd" and cooldown:
        return min(1, 0.1 + 0.9 * (100 - step) / min(cooldown, 100 - warmup))
    return 1


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "cooldown"), [(10, 20), (29, 100), (0, 0), (100, 100)])
def test_schedule_shape(schedule, warmup, cooldown):
    ratios = {"warmup_ratio": warmup / 100, "cooldown_ratio": cooldown / 100}
    train = TrainConfig(schedule=schedule, max_iters=100, min_lr_ratio=0.1, **ratios)
    for step in range(100):
        multiplier = expected(schedule, step, warmup, cooldown)
        assert lr_multiplier(step, train) == pytest.approx(multiplier)
