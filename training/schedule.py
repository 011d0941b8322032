"""The learning-rate schedule, a pure function of the step."""

import math

from configs.schema import TrainConfig


def lr_multiplier(step: int, train: TrainConfig) -> float:
    """Return the learning rate of step 0, 1, ... max_iters - 1 as a fraction of the peak.

    It rises linearly during warm-up. Then `cosine` falls along half a cosine (Loshchilov and Hutter
    2017, SGDR, without restarts); `trapezoid`, also called WSD (warmup-stable-decay), stays at 1
    and then falls linearly (Zhai et al. 2022, section 3.5); `constant` stays at 1. Both falls end
    at min_lr_ratio, just after the last step.
    """
    warmup = ratio_to_steps(train.warmup_ratio, train.max_iters)
    cooldown = ratio_to_steps(train.cooldown_ratio, train.max_iters)

    # warm-up: the first gradients are large, and the optimizer's running averages still unreliable
    if step < warmup:
        return (step + 1) / (warmup + 1)

    # the schedules differ in when they slow down: all the time, at the end, or never
    low = train.min_lr_ratio
    if train.schedule == "cosine":
        # half a cosine: 1 after the warm-up, `low` at step max_iters
        progress = (step - warmup) / (train.max_iters - warmup)
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
    if train.schedule == "trapezoid":
        # before the cooldown, this is more than 1
        fraction_left = (train.max_iters - step) / max(1, cooldown)
        return min(1.0, low + (1 - low) * fraction_left)
    return 1.0


def ratio_to_steps(ratio: float, max_iters: int) -> int:
    """Return a share of `max_iters` steps in whole steps, rounded down."""
    # without the 1e-6, 0.29 of 100 steps would be 28: the product is 28.999999999999996
    return int(ratio * max_iters + 1e-6)
