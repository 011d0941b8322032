"""One optimization step: forward and backward, clip, update."""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import NonFiniteError
from data.batches import IGNORED
from training.evaluate import cross_entropy
from training.schedule import lr_multiplier
from training.state import Run


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    loss         mean over all predictions of the step, nats per character
    grad_norm    gradient norm before clipping
    predictions  number of predictions that count, over all processes (ranks)
    seconds      duration of the step
    """

    loss: float
    grad_norm: float
    predictions: int
    seconds: float


def train_step(run: Run) -> StepResult:
    """Make one optimization step of a run, and count it in `run.progress`.

    Batches and learning rate depend only on the seed and the step, dropout on the rank too. Raises
    NonFiniteError, with the weights unchanged, if the loss or the gradient is not finite.
    """
    began, device = time.perf_counter(), run.runtime.device
    train, progress, world = run.settings.train, run.progress, run.world

    # every rank makes whole batches, so that all know the number of predictions
    n_micro = train.gradient_accumulation_steps
    micro_batches = [run.batches[progress.step * n_micro + i] for i in range(n_micro)]
    # in a tiny batch, all windows can be empty, or parts of questions: then all gradients are 0
    predictions = sum(np.count_nonzero(y != IGNORED) for _, y in micro_batches)

    # for dropout, so that no generator is saved; the seeds of neighboring steps are unrelated
    seeds = np.random.SeedSequence((run.settings.seed, progress.step, world.rank))
    torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    multiplier = lr_multiplier(progress.step, train)
    for optimizer in run.optimizers:
        optimizer.lr = multiplier * optimizer.peak_lr

    run.model.train()  # an evaluation leaves the model in evaluation mode
    rank_loss = torch.zeros((), device=device)
    for i, batch in enumerate(micro_batches, 1):
        x, y = (torch.from_numpy(ids[run.rows]).to(device) for ids in batch)  # (B, T)
        # the ranks exchange gradients once, in the last micro-batch
        with nullcontext() if i == n_micro else world.no_sync(run.ddp_model):
            with run.runtime.autocast():
                logits = run.forward(x)  # (B, T, V)
            # The loss of a step is the sum over its predictions, divided by their number. DDP
            # divides gradients by the number of ranks, so multiply by that first.
            micro_loss = cross_entropy(logits, y, "sum") * world.size / max(1, predictions)
            micro_loss.backward()
        rank_loss += micro_loss.detach()

    # with inf, this only measures the norm
    max_norm = train.grad_clip or math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)

    # waits for the device, once
    rank_loss, grad_norm = torch.stack([rank_loss, grad_norm]).tolist()
    loss = world.mean(rank_loss)
    # before the update: after it, every weight would be NaN
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise NonFiniteError(
            f"after step {progress.step:,}, at learning rate {run.lr:.3g}: loss {loss}, "
            f"gradient norm {grad_norm}; both must be finite"
        )

    for optimizer in run.optimizers:
        optimizer.step()
    run.model.zero_grad()
    progress.step += 1  # now the number of this step, counted from 1
    return StepResult(loss, grad_norm, predictions, time.perf_counter() - began)
