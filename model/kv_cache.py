"""What a generation has read: one KV cache a layer, plain objects handed in, gone when the
generation is.

B batch, T tokens read now, S tokens read so far, H n_head, D head size
"""

from torch import Tensor


class KVCache:
    """Keys and values of one layer, for at most `capacity` tokens.

    The first append fixes batch, heads, dtype and device and reserves the memory, once: `keys` and
    `values`, both (B, H, capacity, D), of which `length` tokens are read. Two conversations are two
    lists of caches; to read afresh, make new ones.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, H, T, D) of the tokens read now -> views (B, H, S, D) of all read so far.

        ValueError where the tokens do not fit, or have another batch, heads, size, dtype or device
        than those before.
        """
        end = self.length + k.size(2)
        if end > self.capacity:
            raise ValueError(
                f"{end} tokens are more than the cache's capacity {self.capacity}; read afresh"
            )
        if self.keys is None:
            self.keys, self.values = (
                new.new_empty(*new.shape[:2], self.capacity, new.size(3)) for new in (k, v)
            )
        for held, new in ((self.keys, k), (self.values, v)):
            place = held[:, :, self.length : end]
            if (place.shape, place.dtype, place.device) != (new.shape, new.dtype, new.device):
                raise ValueError(
                    f"new keys or values are {tuple(new.shape)} {new.dtype} on {new.device}; "
                    f"after those read before they must be {tuple(place.shape)} {place.dtype} on "
                    f"{place.device}"
                )
            place.copy_(new)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]
