"""One optimization step: forward and backward, clip, update."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import NonFiniteError, ResourceError, is_out_of_memory
from training import optimizers, schedule
from training.evaluate import cross_entropy
from training.state import Run


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    loss         mean over all predictions of the step, nats per character
    grad_norm    gradient norm before clipping
    predictions  number of them, over all processes (ranks)
    seconds      duration of the step
    """

    loss: float
    grad_norm: float
    predictions: int
    seconds: float


class TrainStep:
    """The optimization step of a run: each call makes one step and records it in `run.progress`.

    Batches and learning rate depend only on the seed and the step, dropout on the rank too. So from
    the weights, optimizers and progress of a checkpoint, a resumed run repeats what an
    uninterrupted one would have done.
    """

    def __init__(self, run: Run):
        self.run, self.world = run, run.world
        # `run.model`, wrapped in DDP if there are several ranks, then compiled if that is set
        self.ddp_model = self.world.wrap_ddp(run.model)
        self.forward = torch.compile(self.ddp_model) if run.config.compile else self.ddp_model

    def __call__(self) -> StepResult | None:
        """Make one update; return None, and make none, if the step has no predictions.

        Raises NonFiniteError, with the weights unchanged, if the loss or the gradient is not
        finite, and ResourceError if torch.compile fails.
        """
        began = time.perf_counter()
        run, train, progress = self.run, self.run.config.train, self.run.progress

        # micro-batches are numbered through the run
        first = progress.step * train.gradient_accumulation_steps
        micro_batches = range(first, first + train.gradient_accumulation_steps)
        # with a tiny batch, all windows can be empty, or parts of questions: skip the step
        predictions = sum(map(run.batches.predictions, micro_batches))
        if predictions == 0:
            progress.step += 1
            return None

        # dropout and learning rate are functions of the step, so a resume need not restore them
        torch.manual_seed(step_seed(run.config.seed, progress.step, self.world.rank))
        optimizers.set_lr(run.optimizers, schedule.lr_multiplier(progress.step, train))

        # forward and backward, one micro-batch after another
        with compile_errors() if run.config.compile else nullcontext():
            loss = self._forward_backward(micro_batches, predictions)
        loss = self.world.mean(loss)

        # clip; with inf, this only measures the norm
        max_norm = train.grad_clip or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm).item()
        self._check_finite(loss, grad_norm)

        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()

        # record: progress.step becomes the number of this step, counted from 1
        progress.step += 1
        return StepResult(loss, grad_norm, predictions, time.perf_counter() - began)

    def _forward_backward(self, micro_batches: range, predictions: int) -> float:
        """Accumulate the gradients of the micro-batches; return this rank's loss.

        It is scaled so that its mean over the ranks is the mean over all `predictions` of the step.
        """
        run, loss = self.run, 0.0
        run.model.train()  # an evaluation may have switched it
        for i in micro_batches:
            # this rank's rows of the batch, on the device
            x, y = run.batches(i, run.rows)  # (B, T)
            x, y = (torch.from_numpy(ids).to(run.runtime.device) for ids in (x, y))

            # the ranks average their gradients once, in the last micro-batch
            is_last = i == micro_batches[-1]
            with self.world.grad_sync(self.ddp_model, enabled=is_last):
                with run.runtime.autocast():
                    logits = self.forward(x)  # (B, T, V)

                # The loss of a step is the sum over its predictions, divided by their number. DDP
                # divides gradients by the number of ranks, so multiply by that first. (A sum of
                # nothing is 0; a mean would be NaN.)
                part = cross_entropy(logits, y, "sum") * self.world.size / predictions
                part.backward()
            loss += part.item()
        return loss

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        """Raise NonFiniteError unless loss and gradient are finite."""
        # stop before the update: after it, every weight would be NaN
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(
                f"after step {self.run.progress.step:,}, at learning rate {self.run.lr:.3g}: "
                f"loss {loss}, gradient norm {grad_norm}; both must be finite"
            )


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return a seed for torch's default generator: dropout then needs no saved state."""
    # mixes the three numbers well: neighboring steps get unrelated seeds
    sequence = np.random.SeedSequence((seed, step, rank))
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def compile_errors() -> Iterator[None]:
    """Turn an error of torch.compile, in a forward or a backward pass, into a ResourceError."""
    try:
        yield
    except Exception as error:  # the compiler's errors have no common base class
        # not the compiler's fault
        if is_out_of_memory(error):
            raise
        # the rest is a traceback of the compiler
        reason = str(error).partition("\n")[0]
        raise ResourceError(
            f"compile: torch.compile failed ({reason}); --compile=false trains without it"
        ) from error
