"""The values that `auto` stands for: numbers and names."""

import math
from dataclasses import replace
from typing import TypeVar

from configs.schema import (
    DROPOUT_BY_EPOCHS,
    LOGIT_SCALE_DROP,
    MAX_BATCHED_CONTEXT,
    MIN_LOGIT_SCALE,
    Config,
)
from training.device import Runtime, dtype_name

Section = TypeVar("Section")


def resolve(config: Config, runtime: Runtime, epochs: float) -> Config:
    """Replace every `auto` in the settings of a run that reads its text `epochs` times.

    A pure function: with the same text, length and kind of device, a resumed run gets the same
    values. One `auto` stays, because it goes by the clock: `save_interval`.
    """
    model, train = config.model, config.train

    # In bfloat16 on a CPU the backward pass of sdpa is slow. `batched` is faster, but stores T^2
    # weights for each head, so only for short contexts.
    bfloat16_on_cpu = (runtime.device.type, dtype_name(runtime.dtype)) == ("cpu", "bfloat16")
    batched = bfloat16_on_cpu and model.block_size <= MAX_BATCHED_CONTEXT

    # With each epoch the model memorizes more, and is more overconfident on other text.
    dropout = max(p for least, p in DROPOUT_BY_EPOCHS if epochs >= least)
    logit_scale = max(MIN_LOGIT_SCALE, round(1 - LOGIT_SCALE_DROP * epochs, 2))

    # Lengths are shares of the run, and the cooldown comes after the warm-up.
    max_iters = train.max_iters
    warmup = max_iters // 70 if train.warmup_iters == "auto" else train.warmup_iters

    # only an `auto` is replaced; a number or a name stays
    return replace(
        _fill(config, device=runtime.device.type, dtype=dtype_name(runtime.dtype)),
        model=_fill(
            model,
            kernel="batched" if batched else "sdpa",
            dropout=dropout,
            logit_scale=logit_scale,
        ),
        train=_fill(
            train,
            warmup_iters=warmup,
            cooldown_iters=min(6 * max_iters // 7, max_iters - warmup),
            eval_interval=math.ceil(max_iters / 10),
        ),
    )


def _fill(section: Section, **values: object) -> Section:
    """Return the section with these values in place of each `auto`."""
    automatic = {name: value for name, value in values.items() if getattr(section, name) == "auto"}
    return replace(section, **automatic)
