"""Health checks of a run. A warning names a problem and suggests one remedy.

The log prints each warning once per process.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from common.errors import first_few

MAX_GRAD_NORM = 100  # a healthy gradient norm is between 0.1 and 10
MIN_STEPS_FOR_DEAD_HEADS = 300  # heads may need that long to find a use


class HealthWarning(NamedTuple):
    """A warning: its name, such as "overfitting", and its text."""

    name: str
    text: str


def step_warnings(
    step: int, loss: float, grad_norm: float, vocab_size: int
) -> Iterator[HealthWarning]:
    """Yield warnings about a step's loss and its gradient norm before clipping."""
    # before its first update, a model should predict uniformly
    uniform = math.log(vocab_size)
    if step == 1 and loss > uniform + 0.5:
        yield HealthWarning(
            "first loss",
            f"the first loss is {loss:.2f}, far above ln({vocab_size}) = {uniform:.2f}: "
            "confidently wrong before the first update; normal after --init_from on another text, "
            "otherwise check the initial weights",
        )

    # clipping makes a huge gradient harmless at first, but it indicates a problem
    if grad_norm > MAX_GRAD_NORM:
        yield HealthWarning(
            "exploding gradients",
            f"exploding gradients: norm {grad_norm:,.0f} at step {step:,}; halve "
            "--learning_rate, and with Muon --muon_learning_rate",
        )


def loss_warnings(
    evals_since_best: int, best_step: int, train_loss_at_best: float, train_loss: float
) -> Iterator[HealthWarning]:
    """Yield a warning if only the loss on training text still falls."""
    # one evaluation without an improvement is noise, three are not
    if evals_since_best >= 3 and train_loss < train_loss_at_best - 0.01:
        yield HealthWarning(
            "overfitting",
            f"overfitting: the validation loss has not improved since step {best_step:,}, while "
            f"the loss on training text fell from {train_loss_at_best:.4f} to {train_loss:.4f}; "
            "try more model.dropout",
        )


def attention_warnings(
    step: int, max_iters: int, maps: Sequence[Tensor]
) -> Iterator[HealthWarning]:
    """Yield a warning about heads that ignore the text: uniform, or all on one position.

    `maps` are the attention weights (H, T, T) of each layer.
    """
    # early in training many heads have found no use yet
    if step < max(MIN_STEPS_FOR_DEAD_HEADS, max_iters // 2):
        return

    dead = []
    # counted from 1, as in the pictures of TensorBoard
    for layer, heads in enumerate(maps, 1):
        for h, weights in enumerate(heads, 1):
            if reason := dead_head_reason(weights):
                dead.append(f"head {h} of layer {layer} {reason}")

    if dead:
        yield HealthWarning(
            "dead heads",
            f"dead attention heads: {first_few(dead, '; ')}; try fewer heads (model.n_head)",
        )


def dead_head_reason(weights: Tensor) -> str:
    """Return why a head with attention weights (T, T) is dead, or "" if it is not."""
    # fewer than four characters are too few to tell
    T = len(weights)
    if T < 4:
        return ""

    # entropy: the largest is that of equal weights, log(t + 1) for the t + 1 keys of row t
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)[1:]  # (T - 1,)
    max_entropy = (1 + weights.new_tensor(range(1, T))).log()
    if (entropy / max_entropy).mean() > 0.9995:
        return "attends to everything equally"

    # nearly all weight on one position, on average over the later queries
    mean_weight = weights[T // 2 :, : T // 2].mean(0)  # later queries on earlier keys
    if mean_weight.max() > 0.99:
        return f"attends only to position {mean_weight.argmax() + 1}"
    return ""
