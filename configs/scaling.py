"""The length of a run: the settings that are scaled with it, or chosen by it."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from configs.schema import (
    DROPOUT_BY_EPOCHS,
    LOGIT_SCALE_DROP,
    MIN_LOGIT_SCALE,
    ModelConfig,
    TrainConfig,
)

LENGTHS = ("warmup_iters", "cooldown_iters", "eval_interval", "save_interval")
MIN_EVAL_INTERVAL = 10  # steps; not scaled below this, as an evaluation costs several steps


def scaled_to(
    train: TrainConfig, changes: Mapping[str, object], max_evaluations: int | None = None
) -> TrainConfig:
    """Return the settings with these changes, and with the lengths scaled to a changed max_iters.

    warmup_iters, cooldown_iters and eval_interval are scaled in proportion, unless they are among
    the changes, or `auto`. eval_interval is at least MIN_EVAL_INTERVAL, and long enough for at most
    `max_evaluations`. Where this limit more than doubles it, save_interval: auto becomes the
    interval without the limit. Raises ConfigError if the result is not valid.
    """
    before, after = train.max_iters, changes.get("max_iters", train.max_iters)
    scaled = {"warmup_iters": train.warmup_iters * after // before}
    if train.cooldown_iters != "auto":
        scaled["cooldown_iters"] = train.cooldown_iters * after // before
    if "eval_interval" not in changes:
        # rounded up: rounding down could add an evaluation a few steps after the last interval
        interval = math.ceil(train.eval_interval * after / before)
        interval = max(interval, min(MIN_EVAL_INTERVAL, train.eval_interval, after))
        shortest = math.ceil(after / max_evaluations) if max_evaluations else 1
        scaled["eval_interval"] = max(interval, shortest)
        if shortest > 2 * interval and train.save_interval == "auto":
            scaled["save_interval"] = interval
    return replace(train, **scaled | changes)


def changed_lengths(
    before: TrainConfig, after: TrainConfig, given: Collection[str] = ()
) -> dict[str, object]:
    """Return the LENGTHS of `after` that differ from those of `before` and are not `given`."""
    old, new = vars(before), vars(after)
    return {name: new[name] for name in LENGTHS if new[name] != old[name] and name not in given}


def scaling_note(max_iters: int, scaled: Mapping[str, object]) -> str | None:
    """Return the line that tells the user which settings were scaled, if any."""
    if not scaled:
        return None
    lengths = ", ".join(f"{name} {value:,}" for name, value in scaled.items())
    return f"max_iters is {max_iters:,}; scaled with it: {lengths}"


def resolve_auto(model: ModelConfig, epochs: float) -> ModelConfig:
    """Replace `auto` for dropout and logit_scale with the values for a run of this many epochs.

    In runs of about 5 epochs, dropout raised the validation loss; in longer ones it lowered it.
    Each epoch makes the model more overconfident on unseen text (docs/log.md, own texts).
    """
    if model.dropout == "auto":
        dropout = max(p for least, p in DROPOUT_BY_EPOCHS if epochs >= least)
        model = replace(model, dropout=dropout)
    if model.logit_scale == "auto":
        scale = max(MIN_LOGIT_SCALE, round(1 - LOGIT_SCALE_DROP * epochs, 2))
        model = replace(model, logit_scale=scale)
    return model
