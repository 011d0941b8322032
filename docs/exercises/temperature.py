"""The effect of the temperature.

Softmax turns logits into probabilities: e^logit, divided by the sum of all e^logit. The temperature
divides the logits before that. (Many think that it divides the probabilities.)

Task: complete the function, for logits of any size: e^1000 is infinite in a computer. Hint: a
constant can be subtracted from all logits, because e^(a - c) / e^(b - c) = e^a / e^b. Which one?
"""

import numpy as np

from docs.exercises import expect


def probabilities(logits, temperature):
    """Return the probabilities of an array of logits at a temperature above 0."""
    return np.exp(logits) / np.exp(logits).sum()  # your turn: this is right at temperature 1


# --------------------------------------------------------------------------------------- the checks
logits = np.array([2.0, 1.0, 0.0])
for temperature in (1.0, 0.5, 2.0):
    p = probabilities(logits, temperature)
    expect(np.isclose(p.sum(), 1), f"the probabilities sum to {p.sum():.3f}, not to 1.")
    ratio, right = p[0] / p[1], np.exp(1 / temperature)
    sentence = f"at {temperature}, the first should be {right:.2f} times as likely as the second"
    expect(np.isclose(ratio, right), f"{sentence}; it is {ratio:.2f} times as likely.")
with np.errstate(all="ignore"):
    large = probabilities(logits + 1000, 1.0)
    far_apart = probabilities(1000 * logits, 1.0)
expect(np.allclose(large, probabilities(logits, 1.0)), f"logits of about 1,000 give {large}.")
expect(np.allclose(far_apart, [1, 0, 0]), f"the logits 2000, 1000, 0 give {far_apart}.")

cold, hot = (probabilities(logits, temperature).round(2) for temperature in (0.1, 10.0))
print(f"""The logits 2, 1, 0 become {cold} at temperature 0.1 and {hot} at 10.
A temperature T raises each ratio of two probabilities to the power 1 / T: near 0 the likeliest
always wins, far above 1 all are alike. The order never changes. Without the largest logit, which
changes no probability, e^logit cannot overflow.""")
