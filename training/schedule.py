"""The learning rate: a pure function of the step, so a resumed run needs no scheduler state."""

import math

from configs.schema import TrainConfig


def rate(step: int, train: TrainConfig) -> float:
    """The share of the peak rate that step 0, 1, ... max_iters - 1 is taken at.

    A linear warm-up, then: `cosine` to min_lr_ratio (Loshchilov and Hutter 2017, SGDR, without
    restarts); `trapezoid`, flat and then linearly down (Zhai et al. 2022, section 3.5); or
    `constant`.
    """
    if step < train.warmup_iters:
        return (step + 1) / (train.warmup_iters + 1)
    if train.schedule == "cosine":
        progress = (step - train.warmup_iters) / (train.max_iters - train.warmup_iters)
        return (
            train.min_lr_ratio + (1 - train.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )
    if train.schedule == "trapezoid":
        left = (train.max_iters - step) / max(1, train.cooldown)
        return min(1.0, train.min_lr_ratio + (1 - train.min_lr_ratio) * left)
    return 1.0
