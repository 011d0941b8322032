"""Make the cache forget its older half.

When the cache of hornbook.py holds BLOCK_SIZE characters, the positions of training are used up,
and the text can only go on if some are forgotten. The function below cuts off the older half. It
runs, and the text gets worse.

Task: return a cache that knows nothing but the newer half. Hint: what does a key depend on? Where
did `rotate` place it, and what had the blocks below gathered? A call of the model fills the cache
that it is given.
"""

from pathlib import Path

import torch

import hornbook
from docs.exercises import expect


def forget(model, cache):
    """Return a cache of the newer half of the characters, as if there had been no others."""
    half, newer = cache.ids.size(1) // 2, hornbook.Cache(1)
    # your turn: these two lines
    newer.ids = cache.ids[:, half:]
    newer.layers = [[tensor[:, :, half:] for tensor in layer] for layer in cache.layers]
    return newer


# --------------------------------------------------------------------------------------- the checks
play = Path(__file__).parents[2] / "data" / "plays" / "admiral.txt"
vocabulary, ids, _ = hornbook.read([play])
hornbook.N_LAYER, hornbook.N_EMBD, hornbook.BLOCK_SIZE = 2, 32, 32
model, full = hornbook.GPT(len(vocabulary)), hornbook.Cache(1)
with torch.no_grad():
    for parameter in model.parameters():  # with weights as large as those of a trained model
        parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model(ids[None, :32], full)
    cache = forget(model, full)
    sentence = f"its {cache.ids.size(1)} ids are not the 16 of the newer half."
    expect(torch.equal(cache.ids, ids[None, 16:32]), sentence)
    next_logits = model(ids[None, 32:33], cache)[0, -1]
    right = model(ids[None, 16:33])[0, -1]
difference = (next_logits - right).abs().max()
sentence = f"the next logits are up to {difference:.2f} off those after the newer half alone."
expect(difference < 1e-3, sentence)

print("""A key depends on its position; a key and a value depend on what the blocks below gathered
from all earlier characters, and on the two characters before (N_PREVIOUS). Only the ids depend on
nothing, so the newer half must be read again: one more character for each that is written, but all
of them in one call.""")
