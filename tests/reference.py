"""Multi-head attention as the sums over indices that it is, number by number: what every layout and
kernel must agree with. Slow, and written to be checked by reading. Meant for float64; autograd
gives its gradients.

b text, h head, t place of a query, s place of a key, d number of a head
"""

import math


def attention(
    x,
    context,
    value_context,
    heads,
    output,
    *,
    mask=None,
    causal=False,
    qk_norm=False,
    rotary=False,
):
    """x (B, T, C), context and value_context (B, S, C) -> y[b][t][number], nested lists.

    heads[h] is Wq, Wk, Wv and maybe bq, bk, bv; output is W and maybe b; `mask` is of any kind that
    Attention takes.
    """

    def adapted(numbers, place):  # a query or key
        numbers = normalised(numbers) if qk_norm else numbers
        return turned(numbers, place) if rotary else numbers

    def row(b, t):
        concatenated = []
        for h, (Wq, Wk, Wv, *biases) in enumerate(heads):
            bq, bk, bv = biases or (None, None, None)
            numbers = range(len(Wq))
            q = adapted(linear(x[b, t], Wq, bq), t)
            k = [adapted(linear(key, Wk, bk), s) for s, key in enumerate(context[b])]
            v = [linear(value, Wv, bv) for value in value_context[b]]
            extra = [added(mask, b, h, t, s) for s in range(len(k))]
            seen = [s for s in range(len(k)) if extra[s] > -math.inf and not (causal and s > t)]
            score = {
                s: sum(q[d] * k[s][d] for d in numbers) / math.sqrt(len(q)) + extra[s] for s in seen
            }
            total = sum(score[s].exp() for s in seen)
            concatenated += [sum(score[s].exp() / total * v[s][d] for s in seen) for d in numbers]
        return linear(concatenated, *output)

    return [[row(b, t) for t in range(len(x[b]))] for b in range(len(x))]


def linear(x, W, b=None):
    """W x + b"""
    return [
        sum(W[i, j] * x[j] for j in range(len(x))) + (0.0 if b is None else b[i])
        for i in range(len(W))
    ]


def added(mask, b, h, t, s):
    """What the mask adds to the score of key s for query t of head h in text b."""
    if mask is None:
        return 0.0
    indices = {2: (t, s), 3: (b, t, s), 4: (b, h, t, s)}[mask.dim()]
    entry = mask[
        tuple(min(i, size - 1) for i, size in zip(indices, mask.shape, strict=True))
    ].item()
    return {True: 0.0, False: -math.inf}[entry] if isinstance(entry, bool) else entry


def normalised(x):
    """x, scaled so that its numbers have a mean square of 1."""
    length = sum(number**2 for number in x).sqrt()
    return [number * math.sqrt(len(x)) / length for number in x]


def turned(x, place):
    """x, its pairs (i, i + D/2) turned as points of a plane, each by its own angle for each place
    of the text.
    """
    D = len(x)
    half, y = D // 2, list(x)
    for i in range(half):
        angle = place * 10_000 ** (-2 * i / D)
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return y
