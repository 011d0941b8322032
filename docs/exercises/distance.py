"""Turn a position into a distance.

A score is the dot product q . k, which does not know where the two characters are. One could add a
number for the position to both vectors, as below. RoPE rotates them instead: the features i and
i + D/2, for i from 0 to D/2 - 1, are a point in the plane, which is rotated by position *
10000^(-2i/D) radians.

Task: write the rotation. Hint: (a, b) becomes (a cos - b sin, b cos + a sin). Here a is all of the
first half of x, and b all of the second.
"""

import torch

import hornbook
from docs.exercises import expect


def rotate(x, position):
    """Return x (D,) with its pairs rotated for this position."""
    D = len(x)
    angles = position * 10_000.0 ** (-torch.arange(0, D, 2) / D)  # (D/2,)
    return x + torch.cat([angles, angles])  # your turn


# --------------------------------------------------------------------------------------- the checks
q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
near, far, other = (rotate(q, i) @ rotate(k, j) for i, j in ((5, 3), (85, 83), (85, 82)))
sentence = f"the score is {near:.2f} at positions 5 and 3, but {far:.2f} at 85 and 83"
expect(abs(near - far) < 1e-3, f"{sentence}, which are as far apart.")
expect(abs(far - other) > 1e-3, "the score is the same at the distances 2 and 3.")
right = hornbook.rotate(q.expand(1, 1, 1, 8), 7).flatten()
expect(
    torch.allclose(rotate(q, 7), right, atol=1e-5),
    "other pairs, angles or directions than in RoPE.",
)

print(f"""Rotating two vectors by the same angle does not change their dot product. So with RoPE the
score depends on how far apart two characters are, not on where: it is {near:.2f} at distance 2
anywhere, and {other:.2f} at distance 3.""")
