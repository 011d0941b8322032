"""The loss of a model that knows nothing.

The loss of a prediction is -ln p, where p is the probability that the model gave to the character
that came. A model that knows nothing gives each of V characters the same probability.

Task: complete both functions. Hint: the second one turns the first one around.
"""

import math

from docs.exercises import expect


def uniform_loss(V):
    """Return the loss, in nats, of a uniform guess among V characters."""
    return 1 / V  # your turn: this is the probability, not the loss


def perplexity(loss):
    """Return the number of characters among which a uniform guess has this loss."""
    return loss  # your turn


# --------------------------------------------------------------------------------------- the checks
for V in (2, 65):
    loss, count = uniform_loss(V), perplexity(math.log(V))
    expect(loss != math.log2(V), "that is the loss in bits; nats use the natural logarithm.")
    is_right = math.isclose(loss, -math.log(1 / V), rel_tol=1e-6)
    expect(is_right, f"{loss:.3f} is not -ln p for p = 1 / {V}.")
    is_right = math.isclose(count, V, rel_tol=1e-6)
    expect(is_right, f"perplexity(ln {V}) is {count:.3g}, but should be {V}.")

print(f"""Guessing among 65 characters costs ln 65 = {uniform_loss(65):.2f} nats. A run that begins
far above that is sure of something wrong. One that ends at 1.41 is as uncertain as if it chose
among {perplexity(1.41):.1f} characters on average.""")
