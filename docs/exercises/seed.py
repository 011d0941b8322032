"""Why is this sample not reproducible?

Somebody likes sample 3 of seed 1337 and wants to see it again, longer. But each call writes another
text, although there is a seed. (The model is a table: how often each character follows another.)

Task: make sample i of a seed the same text, whatever was drawn before it. Hint: what remembers how
many numbers were drawn? np.random.default_rng takes a number or a tuple of numbers.
"""

import itertools
from pathlib import Path

import numpy as np

from docs.exercises import expect

TEXT = (Path(__file__).parents[2] / "data" / "plays" / "admiral.txt").read_text(encoding="utf-8")
VOCABULARY = sorted(set(TEXT))
COUNTS = np.zeros((len(VOCABULARY), len(VOCABULARY)))
for pair in itertools.pairwise(TEXT):
    COUNTS[tuple(map(VOCABULARY.index, pair))] += 1
RNG = np.random.default_rng(1337)


def sample(seed, i, length):
    """Write `length` characters: sample i of a seed."""
    rng, text = RNG, "\n"  # your turn
    for _ in range(length):
        counts = COUNTS[VOCABULARY.index(text[-1])]
        text += rng.choice(VOCABULARY, p=counts / counts.sum())
    return text[1:]


# --------------------------------------------------------------------------------------- the checks
once = sample(1337, 3, 40)
expect(sample(1337, 3, 40) == once, "the same call gives another text the second time.")
expect(sample(1337, 4, 40) != once, "samples 3 and 4 of a seed are the same text.")
expect(sample(7, 3, 40) != once, "seeds 1337 and 7 give the same text.")
expect(sample(7, 0, 40) != sample(1337, 0, 40), "sample 0 is the same text for two seeds.")
expect(sample(1336, 4, 40) != once, "sample 4 of seed 1336 is the same text.")
expect(sample(1337, 3, 60).startswith(once), "a longer sample 3 begins in another way.")

print(f"""Sample 3 of seed 1337 is always {once!r}. A shared generator remembers all
that was ever drawn from it. One that is made for the pair (seed, i) depends on nothing else.""")
