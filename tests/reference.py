"""Reference multi-head attention: explicit sums over indices, one scalar at a time.

Every layout and kernel must agree with it. It is slow, and written to be checked by reading. Meant
for float64; autograd computes its gradients.

b batch, h head, t query position, s key position, d index within a head
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
    """Compute y[b][t][i] (nested lists) from x (B, T, C), context and value_context (B, S, C).

    heads[h] is Wq, Wk, Wv and optionally bq, bk, bv; output is W and optionally b. `mask` is any
    mask that MultiHeadAttention takes.
    """

    def normalize_and_rotate(vector, position):  # a query or key
        vector = rms_norm(vector) if qk_norm else vector
        return rotate(vector, position) if rotary else vector

    def row(b, t):
        concatenated = []
        for h, (Wq, Wk, Wv, *biases) in enumerate(heads):
            bq, bk, bv = biases or (None, None, None)
            dims = range(len(Wq))
            q = normalize_and_rotate(linear(x[b, t], Wq, bq), t)
            k = [normalize_and_rotate(linear(key, Wk, bk), s) for s, key in enumerate(context[b])]
            v = [linear(value, Wv, bv) for value in value_context[b]]
            extra = [mask_value(mask, b, h, t, s) for s in range(len(k))]
            seen = [s for s in range(len(k)) if extra[s] > -math.inf and not (causal and s > t)]
            score = {
                s: sum(q[d] * k[s][d] for d in dims) / math.sqrt(len(q)) + extra[s] for s in seen
            }
            total = sum(score[s].exp() for s in seen)
            concatenated += [sum(score[s].exp() / total * v[s][d] for s in seen) for d in dims]
        return linear(concatenated, *output)

    return [[row(b, t) for t in range(len(x[b]))] for b in range(len(x))]


def linear(x, W, b=None):
    """Compute W x + b."""
    return [
        sum(W[i, j] * x[j] for j in range(len(x))) + (0.0 if b is None else b[i])
        for i in range(len(W))
    ]


def mask_value(mask, b, h, t, s):
    """Return the value that the mask adds to the score of query t and key s in head h, batch b."""
    if mask is None:
        return 0.0
    indices = {2: (t, s), 3: (b, t, s), 4: (b, h, t, s)}[mask.dim()]
    entry = mask[
        tuple(min(i, size - 1) for i, size in zip(indices, mask.shape, strict=True))
    ].item()
    return {True: 0.0, False: -math.inf}[entry] if isinstance(entry, bool) else entry


def rms_norm(x):
    """Scale x to a mean square of 1."""
    norm = sum(value**2 for value in x).sqrt()
    return [value * math.sqrt(len(x)) / norm for value in x]


def rotate(x, position):
    """Apply RoPE to x: rotate each pair (x[i], x[i + D/2]) by position * 10000^(-2i/D) radians."""
    D = len(x)
    half, y = D // 2, list(x)
    for i in range(half):
        angle = position * 10_000 ** (-2 * i / D)
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return y
