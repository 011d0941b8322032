"""Reference multi-head attention: explicit loops over texts, queries, heads and keys.

Every layout and kernel must agree with it. It is slow, and written to be checked by reading. Meant
for float64; autograd computes its gradients.

b batch, h head, t query position, s key position
"""

import math

import torch


def attention(
    x, context=None, value_context=None, mask=None, *, heads, output, qk_norm=False, rotary=False
):
    """Compute y (B, T, out_features) from what MultiHeadAttention takes.

    heads[h] is Wq, Wk, Wv and optionally bq, bk, bv; output is W and optionally b.
    """
    causal = context is None and value_context is None
    context = x if context is None else context
    value_context = context if value_context is None else value_context

    def normalize_and_rotate(vector, position):  # a query or key
        vector = vector / vector.square().mean().sqrt() if qk_norm else vector
        return rotate(vector, position) if rotary else vector

    def head(b, t, h):
        Wq, Wk, Wv, *biases = heads[h]
        bq, bk, bv = biases or (0.0, 0.0, 0.0)
        q = normalize_and_rotate(Wq @ x[b, t] + bq, t)
        total, weighted_sum = 0.0, torch.zeros_like(q)
        for s in range(context.size(1)):
            extra = mask_value(mask, b, h, t, s)
            if extra == -math.inf or (causal and s > t):
                continue
            k = normalize_and_rotate(Wk @ context[b, s] + bk, s)
            v = Wv @ value_context[b, s] + bv
            weight = (q @ k / math.sqrt(len(q)) + extra).exp()
            total, weighted_sum = total + weight, weighted_sum + weight * v
        return weighted_sum / total if total else weighted_sum

    def row(b, t):
        W, *b_out = output
        return W @ torch.cat([head(b, t, h) for h in range(len(heads))]) + sum(b_out)

    B, T, _ = x.shape
    return torch.stack([torch.stack([row(b, t) for t in range(T)]) for b in range(B)])


def mask_value(mask, b, h, t, s):
    """Return the value that the mask adds to the score of query t and key s in head h, batch b."""
    if mask is None:
        return 0.0
    indices = {2: (t, s), 3: (b, t, s), 4: (b, h, t, s)}[mask.dim()]
    sizes = zip(indices, mask.shape, strict=True)
    entry = mask[tuple(min(i, size - 1) for i, size in sizes)].item()  # sizes of 1 are expanded
    return {True: 0.0, False: -math.inf}[entry] if isinstance(entry, bool) else entry


def rotate(x, position):
    """Apply RoPE to x: rotate each pair (x[i], x[i + D/2]) by position * 10000^(-2i/D) radians."""
    D = len(x)
    half, y = D // 2, list(x)
    for i in range(half):
        angle = position * 10_000 ** (-2 * i / D)
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return torch.stack(y)
