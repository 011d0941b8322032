"""Find the bug in this mask.

No character may see the future. This mask is right in training, where all characters are new. It is
wrong with a KV cache, where some were read before: then S characters have keys, but only the last T
of them are new and have queries. Nothing fails; the model just writes worse text.

Task: mend it, without a look at `attention` in hornbook.py. Hint: which row of the mask for T = S
is left when only the last character is new?
"""

import torch

from docs.exercises import expect


def future(T, S):
    """Return (T, S), True where a key is later than the query: the queries are the last T of S."""
    return torch.ones(T, S, dtype=torch.bool).triu(1)  # find the bug


# --------------------------------------------------------------------------------------- the checks
for T, S in ((3, 3), (1, 5), (2, 5), (4, 6)):
    mask = future(T, S)
    expect(mask.dtype == torch.bool, f"the mask is {mask.dtype}; it must be torch.bool.")
    expect(mask.shape == (T, S), f"for T = {T} and S = {S}, the shape is {tuple(mask.shape)}.")
    for row, position in enumerate(range(S - T, S)):  # of the new characters, counted from 0
        seen = (~mask[row]).nonzero().flatten().tolist()
        sentence = f"if {T} of {S} are new, the one at {position} sees those at {seen}"
        expect(seen == list(range(position + 1)), f"{sentence}, not itself and all before it.")

print(f"""The newest character sees everything, so the triangle ends at the lower right: with 2 new
of 5, where 1 is hidden, the mask is
{future(2, 5).int()}
Training never shows the bug: there T = S. The same trap is in PyTorch: `is_causal=True`
of scaled_dot_product_attention begins at the upper left.""")
