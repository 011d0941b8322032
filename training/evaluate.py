"""Evaluation: the exact loss of a text, a sample, and attention and predictions on a fixed text.

An evaluation does not change the random numbers of training. B batch, T tokens, V vocabulary
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.signals import Stop
from data.batches import evaluation_windows
from model.generate import Sampler, generate
from model.gpt import GPT
from model.mixture import Mixture
from model.runtime import Runtime
from training import health
from training.distributed import SINGLE_PROCESS, World
from training.state import Run

BITS_PER_NAT = 1 / math.log(2)
TOKENS_PER_BATCH = 4096  # few enough for the CPU's caches; 8 times as many take 2.4 times as long
LOGITS_PER_BATCH = 2**24  # bounds the memory for a text of very many distinct characters: 64 MB
TRAIN_DIVISOR = 10  # the training loss is measured on a tenth as many characters as val_loss
PROBE_LENGTH = 32  # characters
MIN_STEPS_FOR_DEAD_HEADS = 300  # heads may need that long to find a use


@dataclass(frozen=True)
class Probe:
    """Attention and predictions on a fixed text: the start of the longest validation segment.

    attention  attention weights of each layer, (H, T, T)
    next_probs probability that each character comes next, (V,)
    """

    text: str
    attention: list[Tensor]
    next_probs: Tensor


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Losses are in nats per character.

    train_loss        exact loss of the beginning of the training text
    improved          whether val_loss is the lowest so far
    loss_by_position  validation loss at each position in the context
    sample            text generated from a fixed seed; empty if val_loss is not finite
    probe             None if val_loss is not finite
    warnings          new ones, which this run has not given before
    """

    step: int
    val_loss: float
    train_loss: float
    improved: bool
    loss_by_position: np.ndarray
    sample: str
    probe: Probe | None
    warnings: list[health.HealthWarning]


def evaluate(run: Run, stop: Stop) -> Evaluation:
    """Evaluate the model and record the result in the run's progress.

    Raises Interrupted, and records nothing, if a stop is requested during the evaluation: a resumed
    run then evaluates again, as if nothing had happened.
    """
    progress, val = run.progress, run.corpus.val
    block_size = run.config.model.block_size
    batch_size = batch_size_for(block_size, run.model.vocab_size)

    # the loss of every character of the validation text, and of the beginning of the training text
    train_part = run.corpus.train.head(len(val) // TRAIN_DIVISOR)
    sums = []
    for split in (val, train_part):
        windows = stop.interruptible(evaluation_windows(split, block_size, batch_size))
        sums.append(loss_sums_by_position(run.model, windows, run.runtime, run.world))
    val_loss, train_loss = (float(nats.sum() / counts.sum()) for nats, counts in sums)

    # the validation loss by position: later characters are predicted from more context
    nats, counts = sums[0]  # each (block_size,)
    reached = counts > 0  # positions that the windows of a short text reach

    # a sample, and the model's view of a fixed text, to see in TensorBoard how they change
    sample, probe = "", None
    if math.isfinite(val_loss):
        sample = run.world.on_rank_0(generate_sample, run, stop)
        probe = run_probe(run)

    # record: from here on the evaluation counts, for the best loss and for early stopping
    improved = progress.record_evaluation(val_loss, train_loss)
    return Evaluation(
        step=progress.step,
        val_loss=val_loss,
        train_loss=train_loss,
        improved=improved,
        loss_by_position=nats[reached] / counts[reached],
        sample=sample,
        probe=probe,
        warnings=progress.new_warnings(_warnings(run, train_loss, probe)),
    )


def _warnings(run: Run, train_loss: float, probe: Probe | None) -> Iterable[health.HealthWarning]:
    progress = run.progress
    yield from health.loss_warnings(
        progress.evals_since_best, progress.best_step, progress.train_loss_at_best, train_loss
    )
    late = max(MIN_STEPS_FOR_DEAD_HEADS, run.config.train.max_iters // 2)
    if probe and progress.step >= late:
        yield from health.attention_warnings(probe.attention)


def batch_size_for(block_size: int, vocab_size: int) -> int:
    """Return how many windows of `block_size` tokens to evaluate at once."""
    tokens = min(TOKENS_PER_BATCH, LOGITS_PER_BATCH // vocab_size)
    return max(1, tokens // block_size)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Compute the nats per character of targets (B, T) under logits (B, T, V), in float32.

    Padding does not count: its targets are IGNORED, the default `ignore_index` of PyTorch.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.inference_mode()
def loss_sums_by_position(
    model: GPT | Mixture,
    windows: Iterable[tuple[np.ndarray, np.ndarray]],
    runtime: Runtime,
    world: World = SINGLE_PROCESS,
) -> np.ndarray:
    """Sum the losses at each position in the context: (2, block_size), nats and counts, in float64.

    `windows` are batches (x, y), each (B, T) with T at most block_size; they are divided among the
    ranks. The model is left in evaluation mode.
    """
    model.eval()
    sums = np.zeros((2, model.config.block_size))
    with world.raise_on_all():
        for x, y in world.shard(windows):
            x, y = (torch.from_numpy(ids).to(runtime.device) for ids in (x, y))
            with runtime.autocast():
                logits = model(x)  # (B, T, V)
            nats = cross_entropy(logits, y, reduction="none").cpu().double().view(y.shape)  # (B, T)
            B, T = y.shape
            sums[:, :T] += nats.sum(0).numpy(), np.full(T, B)
    return sum(world.all_gather(sums))


def exact_loss(
    model: GPT | Mixture, windows: Iterable[tuple[np.ndarray, np.ndarray]], runtime: Runtime
) -> float:
    """Return the mean loss over all predictions of the windows, in nats per character."""
    nats, counts = loss_sums_by_position(model, windows, runtime).sum(axis=1)
    return float(nats / counts)


def generate_sample(run: Run, stop: Stop) -> str:
    """Generate a text from a fixed seed, so that the texts of two evaluations can be compared."""
    tokenizer = run.corpus.tokenizer
    start = torch.from_numpy(tokenizer.encode(tokenizer.start).astype("int64"))[None]  # (1, 1)
    sampler = Sampler(run.config.seed, temperature=0.8)
    length = run.config.train.sample_chars
    characters = generate(run.model, start.to(run.runtime.device), sampler, length)
    characters = stop.interruptible(characters)  # ids, each (1,)
    return "".join(tokenizer.decode(ids.cpu().numpy()) for ids in characters)


def run_probe(run: Run) -> Probe:
    """Run the model on the beginning of the longest segment of the validation text."""
    start, end = max(run.corpus.val.segments, key=lambda segment: segment[1] - segment[0])
    length = min(PROBE_LENGTH, run.config.model.block_size, end - start)
    ids = run.corpus.val.ids[start : start + length].astype("int64")  # (T,)
    on_device = torch.from_numpy(ids).to(run.runtime.device)
    maps = [weights.float().cpu() for weights in run.model.attention_maps(on_device)]
    with torch.inference_mode():
        logits = run.model(on_device[None])[0, -1]  # (V,)
    return Probe(run.corpus.tokenizer.decode(ids), maps, logits.float().softmax(-1).cpu())
