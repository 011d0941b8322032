"""The values of `auto`, from the device, the model, the text and the length of a run."""

import math
from dataclasses import replace
from typing import TypeVar

from configs.schema import (
    DROPOUT_BY_EPOCHS,
    LOGIT_SCALE_DROP,
    MAX_BATCHED_CONTEXT,
    MIN_LOGIT_SCALE,
    MIN_WEIGHTS_PER_CHARACTER,
    Config,
)
from training.device import Runtime, dtype_name

EVALUATIONS = 10  # of a run with `eval_interval: auto`

Section = TypeVar("Section")


def resolve(settings: Config, runtime: Runtime, epochs: float, characters: int) -> Config:
    """Replace every `auto` in the settings of a run.

    `characters` is the length of its text, `epochs` how often the whole run reads it. A pure
    function: with the same text, length and kind of device, a resumed run gets the same values.
    Only `save_interval: auto` stays, because it depends on the wall-clock time.
    """
    model, train = settings.model, settings.train

    # In bfloat16 on a CPU the backward pass of sdpa is slow. `batched` is faster, but stores T^2
    # weights for each head, so only for short contexts (docs/attention.md, section 9).
    device, dtype = runtime.device.type, dtype_name(runtime.dtype)
    batched = device == "cpu" and dtype == "bfloat16" and model.block_size <= MAX_BATCHED_CONTEXT

    # With each epoch, the model memorizes more and becomes more overconfident on other text.
    dropout = max(p for least, p in DROPOUT_BY_EPOCHS if epochs >= least)
    weights = 12 * model.n_layer * model.n_embd**2  # in the blocks
    if weights < MIN_WEIGHTS_PER_CHARACTER * characters:
        dropout = 0.0
    logit_scale = max(MIN_LOGIT_SCALE, round(1 - LOGIT_SCALE_DROP * epochs, 2))

    return replace(
        _fill(settings, device=device, dtype=dtype),
        model=_fill(
            model,
            kernel="batched" if batched else "sdpa",
            dropout=dropout,
            logit_scale=logit_scale,
        ),
        train=_fill(train, eval_interval=math.ceil(train.max_iters / EVALUATIONS)),
    )


def _fill(section: Section, **values: object) -> Section:
    """Return the section with these values in place of each `auto`."""
    automatic = {name: value for name, value in values.items() if getattr(section, name) == "auto"}
    return replace(section, **automatic)
