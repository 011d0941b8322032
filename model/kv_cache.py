"""The KV cache: the keys and values of earlier tokens, so that they are not computed again.

There is one for each layer. When the context is full and its window moves, new ones are made.

B batch, T new tokens, S total tokens, H n_head, D head size
"""

import torch
from torch import Tensor

from configs.schema import ModelConfig


class KVCache:
    """Keys and values of one layer, for at most `capacity` tokens.

    `keys` and `values` are (B, H, capacity, D); the first `length` tokens are filled. The first
    `append` allocates them, and so decides on batch size, heads, dtype and device.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, H, T, D) of the new tokens; return views (B, H, S, D) of all tokens.

        Raises ValueError if the tokens exceed the capacity, or if their batch, heads, head size,
        dtype or device differ from those of the earlier tokens.
        """
        end = self.length + k.size(2)
        if end > self.capacity:
            raise ValueError(
                f"{end} tokens exceed the cache's capacity of {self.capacity}; create a new cache"
            )

        # the first tokens: allocate room for all, so that nothing is copied when the text grows
        if self.keys is None:
            B, H, _, D = k.shape
            self.keys = k.new_empty(B, H, self.capacity, D)
            self.values = torch.empty_like(self.keys)

        # write the new keys and values after the old ones
        for stored, new in ((self.keys, k), (self.values, v)):
            slot = stored[:, :, self.length : end]  # (B, H, T, D)
            # copy_ would broadcast and convert: a wrong batch would go unnoticed
            if (slot.shape, slot.dtype, slot.device) != (new.shape, new.dtype, new.device):
                raise ValueError(
                    f"keys or values are {tuple(new.shape)} {new.dtype} on {new.device}; this "
                    f"cache takes {tuple(slot.shape)} {slot.dtype} on {slot.device}"
                )
            slot.copy_(new)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def new_caches(config: ModelConfig) -> list[KVCache]:
    """Create the empty caches of a model, one per layer."""
    return [KVCache(config.block_size) for _ in range(config.n_layer)]
