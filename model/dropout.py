"""Dropout (Srivastava et al. 2014), faster on a CPU than `F.dropout`.

`F.dropout` spends most of its time drawing random numbers on one core. With dropout 0.2, a training
step of nanoGPT's GPU recipe took 1.64 times as long as without dropout; with this function, 1.04.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

RESOLUTION = 2**16  # p is rounded to a multiple of 1 / RESOLUTION


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Zero each element with probability p in [0, 1); divide the rest by 1 - p, like `F.dropout`.

    On a CPU each element uses 16 random bits, so p is rounded to a multiple of 2^-16, at most
    1 - 2^-16.
    """
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p)

    dropped = min(round(p * RESOLUTION), RESOLUTION - 1)
    # a draw of 64 bits is enough for four elements; None: up to and including the largest int64
    draws = torch.empty(math.ceil(x.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)  # uniform on [-2^15, 2^15)

    mask = torch.empty_like(x)
    torch.ge(bits, dropped - RESOLUTION // 2, out=mask)  # 1 where kept, 0 where dropped
    return x * mask.mul_(RESOLUTION / (RESOLUTION - dropped))
