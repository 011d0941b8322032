"""The KV cache: the keys and values of earlier tokens, so that they are not computed again.

A `Cache` has a `LayerCache` for each block. When the context is full and its window moves, a new
cache is made.

B batch, T new tokens, S total tokens, H n_head, D head size
"""

import torch
from torch import Tensor

from configs.schema import ModelConfig


class LayerCache:
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


class Cache:
    """The memory of a GPT for the tokens that it has read: `GPT.forward` fills it.

    layers      a LayerCache for each block
    recent_ids  the last ids, (B, up to n_previous), which the next tokens embed once more
    """

    def __init__(self, config: ModelConfig):
        self.layers = [LayerCache(config.block_size) for _ in range(config.n_layer)]
        self.recent_ids: Tensor | None = None  # until the first tokens
        self.n_previous = config.n_previous

    @property
    def length(self) -> int:
        """The number of tokens read; it grows when the last layer has read the new ones."""
        return self.layers[-1].length

    def with_recent(self, ids: Tensor) -> Tensor:
        """Put the recent ids before new ones (B, T): (B, N), N <= n_previous + T.

        Raises ValueError for another batch size than that of the earlier ids.
        """
        if self.recent_ids is None:
            return ids
        if len(ids) != len(self.recent_ids):
            raise ValueError(
                f"ids are {len(ids)} texts, the cache holds {len(self.recent_ids)}; "
                "continue the same texts, or create a new cache"
            )
        return torch.cat([self.recent_ids, ids], dim=1)

    def remember(self, ids: Tensor) -> None:
        """Keep the last n_previous ids of (B, N)."""
        recent = ids[:, max(0, ids.size(1) - self.n_previous) :]  # [:, -0:] would keep all
        self.recent_ids = recent.clone()  # the caller may reuse the memory of the ids
