"""Samples: texts, wrong answers and attention that the log shows beside the losses.

The seed is the same each time, so that evaluations can be compared. A Sampler has its own random
numbers, so those of training are left alone.
"""

import numpy as np
import torch
from torch import Tensor

from configs.schema import DEFAULT_TEMPERATURE
from model.generate import Sampler, generate
from model.inspect import attention_maps
from training.evaluate import Evaluation
from training.state import Run

SHOWN_ANSWERS = 3  # the first wrong ones
PROBE_LENGTH = 32  # characters whose attention is shown


def sample_texts(run: Run, result: Evaluation) -> dict[str, str]:
    """Return the texts that the log shows of an evaluation, by tag."""
    if result.exact_match is None:
        return {"samples/text": sample_text(run)}
    return {"samples/wrong_answers": wrong_answers(run, result.val_losses.wrong_documents)}


def sample_text(run: Run) -> str:
    """Sample a text of `sample_chars` characters; for a list, items, each drawn on its own."""
    items, left = [], run.settings.train.sample_chars
    while left > 0:
        sampler = Sampler(run.settings.seed, [len(items)], temperature=DEFAULT_TEMPERATURE)
        items.append(continue_text(run, "", sampler, left))
        left -= len(items[-1])
    return "".join(items)


def continue_text(run: Run, beginning: str, sampler: Sampler, limit: int) -> str:
    """Return `beginning` with at most `limit` characters after it; an item stops at its end."""
    tokenizer, item_format = run.corpus.tokenizer, run.corpus.item_format
    # the model has seen every item after the end of another one
    before = item_format.separator[-1] if item_format else tokenizer.start_character
    ids = tokenizer.encode(before + beginning).astype(np.int64)
    text = beginning
    for new in generate(run.model, torch.from_numpy(ids)[None], sampler, limit):
        text += tokenizer.decode(new.numpy())
        if item_format and text.endswith(item_format.separator):
            break
    return text


def wrong_answers(run: Run, wrong_documents: np.ndarray) -> str:
    """Return the likeliest answers of the first wrong items: one a line, with the right answer.

    An answer that was wrong in bfloat16 but is right here, in float32, is not listed.
    """
    val, item_format = run.val_excerpt, run.corpus.item_format
    lines = []
    for start, end in val.documents[wrong_documents[:SHOWN_ANSWERS]]:
        item = run.corpus.tokenizer.decode(val.ids[start + 1 : end])  # not the end of another item
        question = item_format.question(item)
        answered = continue_text(run, question, Sampler(temperature=0), 2 * len(item))
        if answered != item:
            answer = item.removeprefix(question).removesuffix(item_format.separator)
            lines.append(f"{answered.removesuffix(item_format.separator)}  (right: {answer})")
    return "\n".join(lines)


def attention_images(run: Run) -> dict[str, Tensor]:
    """Return what each layer attends to at the start of the validation text, as images by tag.

    An image (H, 1, 8 T, 8 T) has a square for each of H heads, with T rows, the queries, and T
    columns, the keys. White is a weight of 0, black of 1.
    """
    val = run.corpus.val
    start, end = val.documents[val.lengths.argmax()]
    length = min(PROBE_LENGTH, run.settings.model.block_size, end - start - 1)
    ids = torch.from_numpy(val.ids[start : start + length].astype(int))
    images = {}
    for layer, weights in enumerate(attention_maps(run.model, ids.to(run.runtime.device)), 1):
        shades = 1 - weights.float().cpu().sqrt()  # the root keeps small weights visible
        images[f"views/attention_layer_{layer}"] = shades.kron(torch.ones(1, 8, 8))[:, None]
    return images
