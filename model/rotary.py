"""Rotary position embedding, RoPE (Su et al. 2021, RoFormer, section 3.2.2).

Each pair (i, i + D/2) of a head's features (the pairing of GPT-NeoX) is rotated by an angle
proportional to the token's position. So q . k depends on the distance between two tokens, not on
where they are.

T new tokens, D head size
"""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """The rotation of queries and keys at positions below `max_positions`, shared by all layers.

    The head size is even.
    """

    def __init__(self, head_size: int, max_positions: int):
        super().__init__()
        # the first pairs turn fast and tell neighbors apart, the last ones hardly turn at all
        exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        frequencies = 10_000.0**-exponents  # (D/2,)
        positions = torch.arange(max_positions, dtype=torch.float64)
        angles = positions[:, None] * frequencies  # (positions, D/2)

        # laid out so that `forward` is x * cos + swapped(x) * sin
        cos, sin = angles.cos(), angles.sin()
        cos_sin = torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)])
        cos_sin = cos_sin.to(torch.get_default_dtype())  # (2, positions, D)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """Rotate x (..., T, D), whose first token is at position `start`, to the same shape."""
        cos, sin = self.cos_sin[:, start : start + x.size(-2)].to(x.dtype)  # each (T, D)
        # (a, b) -> (a cos - b sin, b cos + a sin); roll swaps the features of each pair
        half = x.size(-1) // 2
        return torch.addcmul(x * cos, x.roll(half, dims=-1), sin)
