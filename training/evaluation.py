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
    """Nats per character of `targets` (B, T) under `logits` (B, T, V), in float32 whatever the logits are."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.inference_mode()
def exact_loss(model: GPT, windows: Iterable[tuple[np.ndarray, np.ndarray]], runtime: Runtime) -> float:
    """Nats per character over all `windows` of (x, y), each (B, T); the model is left in evaluation mode."""
    model.eval()
    total, count = 0.0, 0
    for x, y in windows:
        x, y = (torch.from_numpy(ids).to(runtime.device) for ids in (x, y))
        with runtime.autocast():
            logits = model(x)
        total += cross_entropy(logits, y, reduction="none").cpu().double().sum().item()
        count += y.numel()
    return total / count
