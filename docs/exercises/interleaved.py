"""Write the weight layout `interleaved`.

One matrix (3C, C) holds the query, key and value weights of all H heads. Its rows have one of two
orders. `fused` (GPT-2): all queries, then all keys, then all values. `interleaved` (GPT-NeoX): the
query, key and value of head 0, D rows each, then those of head 1, and so on.

Task: change the function from `fused` to `interleaved`. Hint: cut into heads first.
"""

import torch

from docs.exercises import expect
from model.attention import LAYOUTS


def project(x, weight, H):
    """Return q, k and v, each (B, H, T, D), from x (B, T, C) and an interleaved weight (3C, C)."""
    # your turn: these two lines are `fused`
    q_k_v = (x @ weight.T).chunk(3, dim=-1)  # each (B, T, C)
    return [tensor.unflatten(-1, (H, -1)).transpose(1, 2) for tensor in q_k_v]


# --------------------------------------------------------------------------------------- the checks
B, T, H, D = 2, 5, 3, 4
C = H * D
x, library = torch.randn(B, T, C), LAYOUTS["interleaved"](C, H, D, bias=False)
q_k_v = project(x, library.linear.weight, H)
for name, yours, right in zip("qkv", q_k_v, library.project(x), strict=True):
    expect(yours.shape == right.shape, f"{name} is {tuple(yours.shape)}, not {tuple(right.shape)}.")
    for h in range(H):
        same = torch.allclose(yours[:, h], right[:, h], atol=1e-6)
        expect(same, f"{name} of head {h} comes from the wrong rows of the matrix.")

print("""The same numbers in another order are another model, and loading them raises no error.
Whoever loads weights must know their layout. So the checkpoints of this project have one order,
whatever the layout: all queries, then all keys, then all values, each head by head.""")
