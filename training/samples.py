"""Samples: texts or wrong answers that the log shows at each evaluation, beside the losses.

The seed is the same each time, so that evaluations can be compared. A Sampler has its own random
numbers, so those of training are left alone.
"""

import math

import numpy as np
import torch

from configs.schema import DEFAULT_TEMPERATURE
from model.generate import Sampler, generate
from training.evaluate import Evaluation
from training.state import Run

SHOWN_ANSWERS = 3  # the first wrong ones


def write_texts(run: Run, result: Evaluation) -> dict[str, str]:
    """Return the texts that the log shows of an evaluation, by tag."""
    if not math.isfinite(result.val_loss):
        return {}
    if result.exact_match is None:
        return {"samples/text": write_sample(run)}
    return {"samples/wrong_answers": wrong_answers(run, result.val_losses.wrong_segments)}


def write_sample(run: Run) -> str:
    """Write a text of `sample_chars` characters; for a list, items, each written on its own."""
    items, left = [], run.settings.train.sample_chars
    while left > 0:
        sampler = Sampler(run.settings.seed, [len(items)], temperature=DEFAULT_TEMPERATURE)
        items.append(complete(run, "", sampler, left))
        left -= len(items[-1])
    return "".join(items)


def complete(run: Run, beginning: str, sampler: Sampler, limit: int) -> str:
    """Return `beginning` with at most `limit` characters after it; an item stops at its end."""
    tokenizer, item_format = run.corpus.tokenizer, run.corpus.item_format
    # the model has seen every item after the end of another one
    before = item_format.start_character if item_format else tokenizer.start_character
    ids = tokenizer.encode(before + beginning).astype(np.int64)
    text = beginning
    for new in generate(run.model, torch.from_numpy(ids)[None], sampler, limit):
        text += tokenizer.decode(new.numpy())
        if item_format and text.endswith(item_format.separator):
            break
    return text


def wrong_answers(run: Run, wrong_segments: np.ndarray) -> str:
    """Return the likeliest answers of the first wrong items: one a line, with the right answer.

    An answer that was wrong in bfloat16 but is right here, in float32, is not listed.
    """
    val, item_format = run.val, run.corpus.item_format
    lines = []
    for start, end in (val.segments[i] for i in wrong_segments[:SHOWN_ANSWERS]):
        item = run.corpus.tokenizer.decode(val.ids[start + 1 : end])  # not the end of another item
        question = item_format.question(item)
        written = complete(run, question, Sampler(temperature=0), 2 * len(item))
        if written != item:
            answer = item.removeprefix(question).removesuffix(item_format.separator)
            lines.append(f"{written.removesuffix(item_format.separator)}  (right: {answer})")
    return "\n".join(lines)
