"""Evaluation: the exact loss of a text, and the share of questions that are answered right.

The validation loss is the mean over every character, not over random batches. A text, or each item
of a list, is cut into windows of block_size characters that do not overlap. The first characters of
a window are predicted from little context: a longer context usually lowers the loss.

B batch, T tokens, V vocabulary
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from data.batches import IGNORE_INDEX, Split, evaluation_windows
from model.gpt import GPT, cross_entropy
from training.device import Runtime
from training.state import Run

BITS_PER_NAT = 1 / math.log(2)
TOKENS_PER_BATCH = 4096  # fit into a CPU's caches: 8 times as many take 2.4 times as long
LOGITS_PER_BATCH = 2**24  # 64 MB at most, also for a text of very many distinct characters


@dataclass(frozen=True)
class PositionLosses:
    """The losses of windows, summed by position, and the documents with a wrong prediction.

    sums            sum of the losses at each position in the context, nats: (block_size,), float64
    counts          number of predictions at each position that count: (block_size,), float64
    wrong_documents  indices of the documents in which a target does not have the largest logit
    """

    sums: np.ndarray
    counts: np.ndarray
    wrong_documents: np.ndarray

    @property
    def mean(self) -> float:
        """The mean over all predictions, in nats per character."""
        return float(self.sums.sum() / self.counts.sum())


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Losses are in nats per character.

    val_losses   losses of `run.val_excerpt`: the whole validation text, if it is not too long
    train_loss   exact loss of the windows `run.train_excerpt`
    exact_match  fraction of the validation items that are answered right; None without answers
    """

    val_losses: PositionLosses
    train_loss: float
    exact_match: float | None

    @property
    def val_loss(self) -> float:
        return self.val_losses.mean


def evaluate(run: Run) -> Evaluation:
    """Measure the losses of a run's model; every rank does, so that all know the same best loss."""
    block_size = run.settings.model.block_size
    batch_size = evaluation_batch_size(block_size, run.model.vocab_size)

    def losses_on(split: Split) -> PositionLosses:
        windows = evaluation_windows(split, block_size, batch_size)
        return position_losses(run.model, windows, run.runtime)

    val_losses, train_losses = losses_on(run.val_excerpt), losses_on(run.train_excerpt)

    # an answer is right if each of its characters is the likeliest after those before
    exact_match = None
    if run.settings.data.answer_after:
        exact_match = 1 - len(val_losses.wrong_documents) / len(run.val_excerpt.documents)
    return Evaluation(val_losses, train_losses.mean, exact_match)


def evaluation_batch_size(block_size: int, vocab_size: int) -> int:
    """Return how many windows of `block_size` tokens to evaluate at once."""
    tokens = min(TOKENS_PER_BATCH, LOGITS_PER_BATCH // vocab_size)
    return max(1, tokens // block_size)


@torch.inference_mode()
def position_losses(
    model: GPT, windows: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], runtime: Runtime
) -> PositionLosses:
    """Compute the losses of windows: batches of `evaluation_windows`.

    Targets IGNORE_INDEX do not count. The model is left in evaluation mode.
    """
    model.eval()  # no dropout
    sums = np.zeros(model.config.block_size)
    counts = np.zeros_like(sums)
    wrong_documents = []
    for x, y, documents in windows:
        T = y.shape[1]
        x, y = (torch.from_numpy(ids).to(runtime.device) for ids in (x, y))
        with runtime.autocast():
            logits = model(x)  # (B, T, V)
        losses = cross_entropy(logits, y, reduction="none").cpu().double().view(y.shape)  # (B, T)

        # in float64, because a text has millions of losses
        is_target = (y != IGNORE_INDEX).cpu()  # (B, T)
        sums[:T] += losses.sum(0).numpy()
        counts[:T] += is_target.sum(0).numpy()

        # is the likeliest character the target, everywhere in a window?
        matches = (logits.argmax(-1) == y).cpu() | ~is_target
        wrong_documents.append(documents[~matches.all(1).numpy()])
    return PositionLosses(sums, counts, np.unique(np.concatenate(wrong_documents)))


def exact_loss(
    model: GPT, windows: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], runtime: Runtime
) -> float:
    """Return the mean loss over all predictions of the windows, in nats per character."""
    return position_losses(model, windows, runtime).mean
