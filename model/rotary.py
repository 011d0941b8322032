"""Positions told by turning: rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2).

Each pair (i, i + D/2) of a head's numbers, as in GPT-NeoX, turns by an angle that grows with the
token's position, so that q . k depends on how far apart two tokens are, not on where they stand.

B batch, T tokens read now, H n_head, D head size
"""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns queries and keys of up to `max_positions` tokens; one for all layers. ValueError for an
    odd head size.
    """

    def __init__(self, head_size: int, max_positions: int, base: float = 10_000.0):
        super().__init__()
        if head_size % 2:
            raise ValueError(
                f"rotary positions turn pairs of numbers: head size {head_size} must be even"
            )
        frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        angles = (
            torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
        )  # (positions, D/2)
        cos, sin = angles.cos(), angles.sin()
        turns = torch.stack(
            [torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)]
        )  # (2, positions, D)
        self.register_buffer("turns", turns.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """(B, H, T, D) -> the same shape; the first of the T tokens stands at position `start`."""
        end = start + x.size(2)
        if end > self.turns.size(1):
            raise ValueError(
                f"{end} tokens are more than the {self.turns.size(1)} positions that were prepared"
            )
        cos, sin = self.turns[:, start:end].to(x.dtype)
        return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)
