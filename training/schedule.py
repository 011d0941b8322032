"""The learning-rate schedule: a pure function of the step, so that resuming needs no state."""

import math

from configs.schema import TrainConfig


def lr_multiplier(step: int, train: TrainConfig) -> float:
    """Return the learning rate of step 0, 1, ... max_iters - 1 as a fraction of the peak.

    It rises linearly during warm-up. Then `cosine` falls along half a cosine (Loshchilov and Hutter
    2017, SGDR, without restarts); `trapezoid`, also called WSD (warmup-stable-decay), stays at 1
    and then falls linearly (Zhai et al. 2022, section 3.5); `constant` stays at 1. Both falls end
    at min_lr_ratio, just after the last step.
    The lengths in `train` are numbers: `resolve` has replaced `auto`.
    """
    # warm-up: the first gradients are large, and the optimizer's running averages still unreliable
    if step < train.warmup_iters:
        return (step + 1) / (train.warmup_iters + 1)

    # the schedules differ in when they slow down: all the time, at the end, or never
    low = train.min_lr_ratio
    if train.schedule == "cosine":
        # half a cosine: 1 after the warm-up, `low` at step max_iters
        progress = (step - train.warmup_iters) / (train.max_iters - train.warmup_iters)
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
    if train.schedule == "trapezoid":
        # before the cooldown, this is more than 1
        fraction_left = (train.max_iters - step) / max(1, train.cooldown_iters)
        return min(1.0, low + (1 - low) * fraction_left)
    return 1.0
