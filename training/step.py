"""One optimization step: forward, backward, clip, update."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.errors import NonFiniteError
from data.batches import IGNORED
from training import evaluate, health, optimizers, runtime, schedule
from training.state import Run

MAX_SKIPPED_IN_A_ROW = 10  # a run that skips more steps in a row than this does not recover


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    loss       mean over all predictions of the step, nats per character
    grad_norm  gradient norm before clipping
    skipped    whether the update was skipped because the loss or the gradient was not finite; False
               for a float16 overflow, which the GradScaler handles
    spike      whether the loss is far above the recent ones
    tokens     number of tokens that were predicted, over all processes (ranks)
    seconds    duration of the step
    warnings   new ones, which this run has not given before
    """

    loss: float
    grad_norm: float
    skipped: bool
    spike: bool
    tokens: int
    seconds: float
    warnings: list[health.HealthWarning]


class TrainStep:
    """The optimization step of a run: each call makes one update and records it in `run.progress`.

    The batches depend only on the seed and the step, dropout only on the seed, step and rank.
    """

    def __init__(self, run: Run, notify: Callable[[str], None]):
        config, self.run = run.config, run
        self.world = run.runtime.world
        self.accumulation = config.train.gradient_accumulation_steps
        self.batches = run.batches
        self.rows = self.world.batch_slice(config.train.batch_size)
        self.network = self.world.wrap_ddp(run.model)  # the model itself in a single process
        self.forward = self.network  # compiled, with `compile: true`
        if config.compile:
            self.forward = runtime.compile_or_fall_back(self.network, notify)

    def __call__(self) -> StepResult:
        """Make one update; raise NonFiniteError for a non-finite step that is not skipped."""
        began = time.perf_counter()
        run, train, progress = self.run, self.run.config.train, self.run.progress
        seed = runtime.step_seed(run.config.seed, progress.step, self.world.rank)
        torch.manual_seed(seed)  # for dropout
        optimizers.set_lr(run.optimizers, schedule.lr_multiplier(progress.step, train))
        micro_batches = range(
            self.accumulation * progress.step, self.accumulation * (progress.step + 1)
        )
        tokens = sum(map(self.batches.predictions, micro_batches))
        # the mean over all ranks, which also learn here if one of them was asked to stop
        loss = self.world.all_reduce_loss_and_stop_request(
            self._forward_backward(micro_batches, tokens)
        )
        for optimizer in run.optimizers:
            run.scaler.unscale_(optimizer)
        parameters, max_norm = run.model.parameters(), train.grad_clip or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        scale_was_reduced = self._update(finite)
        overflow = scale_was_reduced and math.isfinite(loss)
        skipped = not finite and not overflow
        if skipped:
            self._check_skip_allowed(loss, grad_norm)
            progress.record_skipped_step()
            spike, warnings = False, []
        else:
            spike = progress.record_step(loss)
            warnings = []
            if finite:
                found = health.check_step(progress.step, loss, grad_norm, run.model.vocab_size)
                warnings = progress.new_warnings(found)
        if finite and run.ema_model is not None:
            run.update_ema()
        seconds = time.perf_counter() - began
        return StepResult(loss, grad_norm, skipped, spike, tokens, seconds, warnings)

    def _forward_backward(self, micro_batches: range, tokens: int) -> float:
        """Accumulate the gradients of the micro-batches; return this rank's part of the loss.

        The mean of these parts over the ranks is the mean loss over all `tokens` of the step, even
        if padding gives the ranks unequal numbers of them. Label smoothing affects the gradients,
        but not the returned loss, which stays comparable with the validation loss.
        """
        run, loss = self.run, 0.0
        run.model.train()
        for i in micro_batches:
            x, y = self.batches(i, self.rows)  # (B, T)
            part_tokens = np.count_nonzero(y != IGNORED)  # predicted by this rank, micro-batch i
            ngram_probs = self._ngram_probs(x)
            x, y = (torch.from_numpy(ids).to(run.runtime.device) for ids in (x, y))
            with self.world.grad_sync(self.network, enabled=i == micro_batches[-1]):
                with run.runtime.autocast():
                    logits = self.forward(x)  # (B, T, V)
                # Weight the mean over these tokens by their share of the step's tokens. The factor
                # world.size is there because DDP divides the gradients by it.
                share = part_tokens * self.world.size / tokens
                part = evaluate.cross_entropy(logits, y) * share
                objective = part  # differentiated; only `part` is logged
                if ngram_probs is not None:
                    weight = run.config.train.ngram_label_smoothing
                    smoothing = soft_cross_entropy(logits, ngram_probs, y != IGNORED) * share
                    objective = (1 - weight) * part + weight * smoothing
                run.scaler.scale(objective).backward()
            loss += part.item()
        return loss

    def _ngram_probs(self, x: np.ndarray) -> Tensor | None:
        """Return the n-gram model's probabilities of the next token (B, T, V), after each of x.

        Without label smoothing, return None.
        """
        if self.run.label_ngram_model is None:
            return None
        probs = self.run.label_ngram_model.probs(x, new=x.shape[1])
        return torch.from_numpy(probs).to(self.run.runtime.device)

    def _update(self, finite: bool) -> bool:
        """Update the weights if loss and gradient are finite, and clear the gradients.

        Return whether a float16 overflow made the GradScaler reduce its scale. Once the scale is
        below 1, scaling cannot be the cause, and a non-finite gradient is not an overflow.
        """
        run = self.run
        for optimizer in run.optimizers:
            if finite:
                run.scaler.step(optimizer)
            optimizer.zero_grad()
        before = run.scaler.get_scale()
        run.scaler.update()
        return 1 <= run.scaler.get_scale() < before

    def _check_skip_allowed(self, loss: float, grad_norm: float) -> None:
        """Raise NonFiniteError unless the settings allow this step to be skipped."""
        run = self.run
        allowed = MAX_SKIPPED_IN_A_ROW if run.config.train.on_nonfinite == "skip" else 0
        if run.progress.skipped_in_a_row >= allowed:
            raise NonFiniteError(
                f"after step {run.progress.step:,}, at learning rate {run.lr:.3g}: "
                f"loss {loss}, gradient norm {grad_norm}; both must be finite"
            )


def soft_cross_entropy(logits: Tensor, probs: Tensor, counted: Tensor) -> Tensor:
    """Compute the mean cross-entropy with the targets `probs` under the logits, in float32.

    Both are (B, T, V). Only positions where `counted` (B, T) is True count.

    The loss with smoothed labels is (1 - weight) * cross_entropy + weight * soft_cross_entropy
    (Szegedy et al. 2016, section 7, with uniform `probs`).
    """
    nats = -(probs * logits.float().log_softmax(dim=-1)).sum(dim=-1)  # (B, T)
    return nats[counted].mean()
