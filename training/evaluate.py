"""The exact loss of a text: every prediction once, summed in float64, with nothing drawn at random.

B batch, T tokens, V vocabulary
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from model.gpt import GPT
from training.runtime import Runtime

BITS = 1 / math.log(2)  # bits in a nat


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Nats per character of `targets` (B, T) under `logits` (B, T, V), in float32 whatever the
    logits are.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.inference_mode()
def losses_by_place(
    model: GPT, windows: Iterable[tuple[np.ndarray, np.ndarray]], runtime: Runtime
) -> np.ndarray:
    """At each place of a window, the nats of all predictions there and their number: (2,
    block_size) in float64.

    `windows` of (x, y) are (B, T), T at most block_size, shared among the ranks; the model is left
    in evaluation mode.
    """
    model.eval()
    ranks, places = runtime.ranks, np.zeros((2, model.config.block_size))
    with ranks.together():
        for x, y in ranks.share(windows):
            x, y = (torch.from_numpy(ids).to(runtime.device) for ids in (x, y))
            with runtime.autocast():
                logits = model(x)
            nats = cross_entropy(logits, y, reduction="none").cpu().double().view(y.shape)
            places[:, : y.size(1)] += nats.sum(0).numpy(), np.full(y.size(1), len(y))
    return sum(ranks.gather(places))


def exact_loss(
    model: GPT, windows: Iterable[tuple[np.ndarray, np.ndarray]], runtime: Runtime
) -> float:
    """Nats per character over all `windows`, as `losses_by_place` takes them."""
    nats, predictions = losses_by_place(model, windows, runtime).sum(axis=1)
    return float(nats / predictions)
