"""One optimization step: forward and backward, clip, update."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import NonFiniteError, ResourceError, is_out_of_memory
from data.batches import IGNORED
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

    Batches and learning rate depend only on the seed and the step, dropout on the rank too.
    """

    def __init__(self, run: Run):
        self.run, self.world = run, run.world
        # `run.model`, wrapped in DDP if there are several ranks, then compiled if that is set
        self.ddp_model = self.world.wrap_ddp(run.model)
        self.forward = self.ddp_model
        if run.config.compile:
            with compile_errors():
                self.forward = torch.compile(self.ddp_model)

    def __call__(self) -> StepResult | None:
        """Make one update; return None, and make none, if the step has no predictions.

        Raises NonFiniteError, with the weights unchanged, if the loss or the gradient is not
        finite, and ResourceError if torch.compile fails.
        """
        began = time.perf_counter()
        run, train, progress = self.run, self.run.config.train, self.run.progress

        # every rank makes whole batches, so that all know the number of predictions
        first = progress.step * train.gradient_accumulation_steps
        micro_batches = [run.batches(first + i) for i in range(train.gradient_accumulation_steps)]
        predictions = sum(np.count_nonzero(y != IGNORED) for _, y in micro_batches)
        # in a tiny batch, all windows can be empty, or parts of questions
        if predictions == 0:
            progress.step += 1
            return None

        torch.manual_seed(step_seed(run.config.seed, progress.step, self.world.rank))
        optimizers.set_lr(run.optimizers, schedule.lr_multiplier(progress.step, train))

        with compile_errors() if run.config.compile else nullcontext():
            rank_loss = self._forward_backward(micro_batches, predictions)
        # with inf, this only measures the norm
        max_norm = train.grad_clip or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)

        # waits for the device, once
        rank_loss, grad_norm = torch.stack([rank_loss, grad_norm]).tolist()
        loss = self.world.all_mean(rank_loss)
        self._check_finite(loss, grad_norm)

        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()

        progress.step += 1  # now the number of this step, counted from 1
        return StepResult(loss, grad_norm, predictions, time.perf_counter() - began)

    def _forward_backward(
        self, micro_batches: list[tuple[np.ndarray, np.ndarray]], predictions: int
    ) -> torch.Tensor:
        """Accumulate the gradients of the micro-batches; return this rank's loss, on the device.

        It is scaled so that its mean over the ranks is the mean over all `predictions` of the step.
        """
        run, device = self.run, self.run.runtime.device
        loss = torch.zeros((), device=device)
        run.model.train()  # an evaluation may have switched it
        for i, batch in enumerate(micro_batches, 1):
            x, y = (torch.from_numpy(ids[run.rows]).to(device) for ids in batch)  # (B, T)

            # the ranks average their gradients once, in the last micro-batch
            is_last = i == len(micro_batches)
            with self.world.grad_sync(self.ddp_model, enabled=is_last):
                with run.runtime.autocast():
                    logits = self.forward(x)  # (B, T, V)

                # The loss of a step is the sum over its predictions, divided by their number. DDP
                # divides gradients by the number of ranks, so multiply by that first. (A sum of
                # nothing is 0; a mean would be NaN.)
                part = cross_entropy(logits, y, "sum") * self.world.size / predictions
                part.backward()
            loss += part.detach()
        return loss

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        """Raise NonFiniteError unless loss and gradient are finite.

        This is checked before the update: after it, every weight would be NaN.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(
                f"after step {self.run.progress.step:,}, at learning rate {self.run.lr:.3g}: "
                f"loss {loss}, gradient norm {grad_norm}; both must be finite"
            )


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return a seed for torch's default generator: dropout then needs no saved state."""
    # neighboring steps get unrelated seeds
    sequence = np.random.SeedSequence((seed, step, rank))
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def compile_errors() -> Iterator[None]:
    """Turn an error of torch.compile, or of a pass that it compiles, into a ResourceError."""
    try:
        yield
    except Exception as error:  # the compiler's errors have no common base class
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise ResourceError(
            f"compile: torch.compile failed ({reason}); --compile=false trains without it"
        ) from error
