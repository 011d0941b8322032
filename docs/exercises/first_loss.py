"""Why is the first loss a little above ln V?

The first logits are not 0: the weights begin at random, so the logits are noise, whose standard
deviation is sigma. A loss is ln(the sum of all e^logit) - (the logit of the character that came).

Task: complete the function. Hint: e^noise has the mean e^(sigma^2 / 2), not 1. So what is the sum
over V characters? The logit of the character that came is 0 on average.
"""

import math

import torch
from torch.nn.functional import cross_entropy

import hornbook
from docs.exercises import expect


def first_loss(V, sigma):
    """Return the loss to expect from logits that are noise of standard deviation sigma."""
    return math.log(V)  # your turn: this is right for sigma = 0 only


# --------------------------------------------------------------------------------------- the checks
generator = torch.Generator().manual_seed(1)
for sigma in (0.0, 0.3, 0.6):
    logits = sigma * torch.randn(20_000, 65, generator=generator)
    measured = cross_entropy(logits, torch.zeros(20_000, dtype=torch.int64)).item()
    difference = first_loss(65, sigma) - measured
    expect(abs(difference) < 0.02, f"with sigma = {sigma}, you are {difference:+.3f} off.")

ids = torch.randint(65, (4, 257), generator=generator)
with torch.no_grad():
    logits = hornbook.GPT(65)(ids[:, :-1])
measured = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
expected = first_loss(65, sigma=0.02 * hornbook.N_EMBD**0.5)
print(f"""Noise costs sigma^2 / 2. In hornbook.py sigma is 0.32, so you expect a first loss of
{expected:.2f}; it is {measured:.2f}, and ln 65 is {math.log(65):.2f}. One far above that
would mean that the initial weights are too large. Look at it whenever you build a model.""")
