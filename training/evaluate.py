"""Evaluation: the exact loss of a text, a sample, and attention and predictions on a fixed text.

The validation loss is the mean over every character, not over random batches. A text is cut into
windows of block_size characters that do not overlap, and so is each item of a list. An evaluation
leaves the random numbers of training alone: a Sampler has its own.

B batch, T tokens, V vocabulary, H heads
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.stop import Stop
from configs.schema import DEFAULT_TEMPERATURE
from data.batches import IGNORED, Split, evaluation_windows, windows_of
from model.decode import Decoder
from model.generate import Sampler, build_decoder, generate
from model.gpt import GPT
from model.inspect import attention_maps
from training.device import Runtime
from training.state import Run

BITS_PER_NAT = 1 / math.log(2)
# fits into the CPU's caches: with 8 times as many, an evaluation takes 2.4 times as long
TOKENS_PER_BATCH = 4096
LOGITS_PER_BATCH = 2**24  # bounds the memory for a text of very many distinct characters: 64 MB
TRAIN_DIVISOR = 10  # evaluate on a tenth as many training characters as validation characters
PROBE_LENGTH = 32  # characters
SHOWN_ANSWERS = 3  # wrong answers to show at each evaluation


@dataclass(frozen=True)
class Probe:
    """Attention and predictions on a fixed text: the start of the validation text, or of its
    longest item.

    attention  attention weights of each layer, (H, T, T)
    next_probs probability that each character comes next, (V,)
    """

    text: str
    attention: list[Tensor]
    next_probs: Tensor


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Losses are in nats per character.

    train_loss        exact loss of parts of the training text, spread evenly over it
    improved          whether val_loss is the lowest so far
    loss_by_position  validation loss at each position in the context; NaN: nothing counts there
    exact_match       fraction of the validation items answered right; None: no answers
    wrong_answers     a few wrong items, each with its right answer
    sample            text generated from a fixed seed; empty for questions, and if val_loss is not
                      finite
    probe             None if val_loss is not finite
    """

    step: int
    val_loss: float
    train_loss: float
    improved: bool
    loss_by_position: np.ndarray
    exact_match: float | None
    wrong_answers: list[str]
    sample: str
    probe: Probe | None


def evaluate(run: Run, stop: Stop) -> Evaluation:
    """Evaluate the model and record the result in the run's progress.

    Every rank evaluates the whole text, so that all know the same best loss; rank 0 alone draws
    samples.

    Raises Interrupted, and records nothing, if a stop is requested during the evaluation: a resumed
    run then evaluates again, as if nothing had happened.
    """
    progress, val = run.progress, run.corpus.val
    block_size = run.config.model.block_size
    batch_size = batch_size_for(block_size, run.model.vocab_size)

    # the loss of every character of the validation text, and of parts of the training text
    train_part = run.corpus.train.spread(len(val) // TRAIN_DIVISOR, block_size)
    losses = []
    for split in (val, train_part):
        windows = stop.interruptible(evaluation_windows(split, block_size, batch_size))
        losses.append(window_losses(run.model, windows, run.runtime))
    val_losses, train_losses = losses
    val_loss, train_loss = val_losses.mean, train_losses.mean

    # the validation loss by position: later characters are predicted from more context
    val_nats, val_counts = val_losses.nats, val_losses.counts  # each (block_size,)
    T = np.flatnonzero(val_counts)[-1] + 1  # the windows of a short text are shorter
    with np.errstate(invalid="ignore"):  # 0 / 0 where nothing counts
        loss_by_position = val_nats[:T] / val_counts[:T]

    # a sample, and the model's view of a fixed text, to see in TensorBoard how they change
    sample, probe = "", None
    decoder = None
    if math.isfinite(val_loss):
        decoder = build_decoder(run.model) if run.world.is_main else None
        sample = generate_sample(run, stop, decoder) if run.world.is_main else ""
        probe = run_probe(run)

    # questions: an answer is right if each of its characters is the likeliest after those before
    exact_match, wrong_answers = None, []
    if val.targets is not None:
        wrong = wrong_segments(val, block_size, val_losses.all_correct)
        exact_match = 1 - len(wrong) / len(val.segments)
        if run.world.is_main:
            wrong_answers = draw_answers(run, stop, wrong[:SHOWN_ANSWERS], decoder)

    # record: from here on the evaluation counts, for the best loss and for early stopping
    improved = progress.record_evaluation(val_loss, train_loss)
    return Evaluation(
        step=progress.step,
        val_loss=val_loss,
        train_loss=train_loss,
        improved=improved,
        loss_by_position=loss_by_position,
        exact_match=exact_match,
        wrong_answers=wrong_answers,
        sample=sample,
        probe=probe,
    )


def batch_size_for(block_size: int, vocab_size: int) -> int:
    """Return how many windows of `block_size` tokens to evaluate at once."""
    # few enough for the caches, and for the memory
    tokens = min(TOKENS_PER_BATCH, LOGITS_PER_BATCH // vocab_size)
    return max(1, tokens // block_size)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Compute the cross-entropy of targets (B, T) under logits (B, T, V) in nats, in float32.

    Padding does not count: its targets are IGNORED, the default `ignore_index` of PyTorch.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


@dataclass(frozen=True, eq=False)
class WindowLosses:
    """The losses of windows of a text.

    nats         sum of the losses at each position in the context, (block_size,), in float64
    counts       number of predictions at each position that count, (block_size,)
    all_correct  whether all targets of a window have the largest logit, (number of windows,)
    """

    nats: np.ndarray
    counts: np.ndarray
    all_correct: np.ndarray

    @property
    def mean(self) -> float:
        """The mean over all predictions, in nats per character."""
        return float(self.nats.sum() / self.counts.sum())


@torch.inference_mode()
def window_losses(
    model: GPT, windows: Iterable[tuple[np.ndarray, np.ndarray]], runtime: Runtime
) -> WindowLosses:
    """Compute the losses of windows: batches (x, y), each (B, T) with T at most block_size.

    Targets IGNORED do not count. The model is left in evaluation mode.
    """
    # no dropout, and `logit_scale` applies
    model.eval()
    nats, counts = np.zeros((2, model.config.block_size))
    all_correct = []
    for x, y in windows:
        # the logits in the dtype of training, the losses in float32
        T = y.shape[1]
        x, y = (torch.from_numpy(ids).to(runtime.device) for ids in (x, y))
        with runtime.autocast():
            logits = model(x)  # (B, T, V)
        losses = cross_entropy(logits, y, reduction="none").cpu().double().view(y.shape)  # (B, T)

        # sums by position, in float64: a text has millions of losses
        is_target = (y != IGNORED).cpu()  # (B, T)
        nats[:T] += losses.sum(0).numpy()
        counts[:T] += is_target.sum(0).numpy()

        # is the likeliest character the target, everywhere in a window?
        matches = (logits.argmax(-1) == y).cpu() | ~is_target
        all_correct.append(matches.all(1).numpy())
    return WindowLosses(nats, counts, np.concatenate(all_correct))


def wrong_segments(split: Split, block_size: int, all_correct: np.ndarray) -> np.ndarray:
    """Return the indices of the segments that have a window with a wrong prediction."""
    # the segment of each window, in the order of `all_correct`
    segments, _, _ = windows_of(split, block_size)
    return np.unique(segments[~all_correct])


def exact_loss(
    model: GPT, windows: Iterable[tuple[np.ndarray, np.ndarray]], runtime: Runtime
) -> float:
    """Return the mean loss over all predictions of the windows, in nats per character."""
    return window_losses(model, windows, runtime).mean


def generate_sample(run: Run, stop: Stop, decoder: Decoder | None) -> str:
    """Generate a text from a fixed seed, so that the texts of two evaluations can be compared.

    For a list, these are items, each drawn on its own. For questions it is empty: the model learns
    to answer them, not to ask them.
    """
    tokenizer, item_format = run.corpus.tokenizer, run.corpus.item_format

    # a list: one item after another, each from random numbers of its own
    if item_format:
        items, left = [], 0 if item_format.answer_after else run.config.train.sample_chars
        # an item ends with its separator, or where the characters run out
        while left > 0:
            sampler = Sampler(run.config.seed, [len(items)], temperature=DEFAULT_TEMPERATURE)
            items.append(complete_item(run, stop, "", sampler, left, decoder))
            left -= len(items[-1])
        return "".join(items)

    # a text: it begins as a text of sample.py without a prompt does
    start = torch.from_numpy(tokenizer.encode(tokenizer.start).astype(np.int64))[None]  # (1, 1)
    sampler = Sampler(run.config.seed, temperature=DEFAULT_TEMPERATURE)
    characters = generate(run.model, start, sampler, run.config.train.sample_chars, decoder=decoder)
    characters = stop.interruptible(characters)  # ids, each (1,)
    return "".join(tokenizer.decode(ids.numpy()) for ids in characters)


def complete_item(
    run: Run, stop: Stop, beginning: str, sampler: Sampler, limit: int, decoder: Decoder | None
) -> str:
    """Draw the rest of an item, at most `limit` characters; return all of it, with its end."""
    tokenizer, item_format = run.corpus.tokenizer, run.corpus.item_format
    # the model has seen every item after the end of another one
    ids = tokenizer.encode(item_format.start + beginning).astype(np.int64)

    # draw characters until its end comes
    item = beginning
    prompt = torch.from_numpy(ids)[None]
    for new in stop.interruptible(generate(run.model, prompt, sampler, limit, decoder=decoder)):
        item += tokenizer.decode(new.numpy())
        if item.endswith(item_format.separator):
            break
    return item


def draw_answers(run: Run, stop: Stop, segments: np.ndarray, decoder: Decoder | None) -> list[str]:
    """Generate the likeliest answers of some validation items; add the right answer to each.

    An answer that was wrong in bfloat16 but is right here, in float32, is not listed.
    """
    val, item_format, lines = run.corpus.val, run.corpus.item_format, []
    for start, end in (val.segments[i] for i in segments):
        item = run.corpus.tokenizer.decode(val.ids[start + 1 : end])  # not the end of another item
        # show the model the question alone; temperature 0 draws the likeliest
        question = item_format.question(item)
        drawn = complete_item(run, stop, question, Sampler(temperature=0), 2 * len(item), decoder)
        if drawn != item:
            answer = item.removeprefix(question).removesuffix(item_format.separator)
            lines.append(f"{drawn.removesuffix(item_format.separator)}  (right: {answer})")
    return lines


def run_probe(run: Run) -> Probe:
    """Run the model on the beginning of the longest segment of the validation text."""
    # a short text, the same at every evaluation
    start, end = max(run.corpus.val.segments, key=lambda segment: segment[1] - segment[0])
    length = min(PROBE_LENGTH, run.config.model.block_size, end - start - 1)
    ids = run.corpus.val.ids[start : start + length].astype(np.int64)  # (T,)

    # what its heads look at, and what it expects to come next
    on_device = torch.from_numpy(ids).to(run.runtime.device)
    maps = [weights.float().cpu() for weights in attention_maps(run.model, on_device)]
    with torch.inference_mode():
        logits = run.model(on_device[None])[0, -1]  # (V,)
    return Probe(run.corpus.tokenizer.decode(ids), maps, logits.float().softmax(-1).cpu())
