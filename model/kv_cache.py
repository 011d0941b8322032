"""The KV cache: the keys and values of earlier tokens, so that they are not computed again.

When the context is full and its window moves, a new cache is made.

B batch, T new tokens, S total tokens, H n_head, D head size
"""

import torch
from torch import Tensor

from configs.schema import ModelConfig


class LayerCache:
    """Keys and values of one layer, for at most `capacity` tokens.

    `keys` and `values` are (B, H, capacity, D); the first `length` tokens are filled. The first
    `append` allocates them, so that nothing is copied when the text grows.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, H, T, D) of new tokens; return views (B, H, S, D) of all tokens."""
        if self.keys is None:
            B, H, _, D = k.shape
            self.keys, self.values = (k.new_empty(B, H, self.capacity, D) for _ in range(2))
        start, self.length = self.length, self.length + k.size(2)
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class KVCache:
    """The memory of a GPT for the tokens that it has read: `GPT.forward` fills it.

    layers  a LayerCache for each block
    ids     of the tokens, (B, S): the next ones embed the last of them too; None until the first
    """

    def __init__(self, config: ModelConfig):
        self.layers = [LayerCache(config.block_size) for _ in range(config.n_layer)]
        self.ids: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens read."""
        return 0 if self.ids is None else self.ids.size(1)

    def ids_with(self, ids: Tensor) -> Tensor:
        """Return the ids read so far and new ones (B, T), all in memory of their own: (B, S)."""
        return torch.cat([ids[:, :0] if self.ids is None else self.ids, ids], dim=1)
