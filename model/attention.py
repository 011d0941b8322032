"""Multi-head attention with two independent settings: the weight layout and the attention kernel.

The layout decides how the query, key and value weights are stored, the kernel how attention is
computed from queries, keys and values. All pairs of the two compute the same function.
docs/attention.md derives each one step by step.

Start at `MultiHeadAttention.forward`, near the end, then read one layout, `Fused`, and one kernel,
`batched`. The others are variations of these.

B batch, T new tokens (queries), S total tokens (keys), C n_embd, H n_head, D head size
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.dropout import dropout
from model.kv_cache import LayerCache
from model.rotary import Rotary

INIT_STD = 0.02  # as in GPT-2
MAX_BATCHED_CONTEXT = 1024  # longest context in which the kernel `auto` may be `batched`


def split_heads(x: Tensor, n_head: int) -> Tensor:
    """Split the features into heads: (B, T, H*D) -> (B, H, T, D)."""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Concatenate the features of the heads: (B, H, T, D) -> (B, T, H*D)."""
    return x.transpose(1, 2).flatten(2)


# ----------------------------------------------------------------------------------- weight layouts


class QKVProjection(nn.Module):
    """A weight layout: how the query, key and value weights are stored, and how they are applied.

    To all other code, every layout is one tensor qkv (3, H, D, C): query, key and value; the heads;
    the features of a head; the features of a token. With biases, a second one is (3, H, D).

    A layout is a subclass with three methods:

        build(C, H, D, bias)  creates the parameters; a GPT draws their values anew
        parts(qkv, kind)      yields each parameter with the part of qkv that it stores: a view, in
                              the same order; for the kind "bias", qkv is (3, H, D)
        project(x)            computes queries, keys and values: (B, T, C) -> three of (B, H, T, D)

    With `parts` alone, model/parameters.py copies the parameters to and from qkv, for
    initialization, checkpoints, optimizers, the page and convert.py.
    """

    def __init__(self, n_embd: int, n_head: int, head_size: int, bias: bool):
        super().__init__()
        self.n_head = n_head
        self.shapes = {"weight": (3, n_head, head_size, n_embd)}
        if bias:
            self.shapes["bias"] = (3, n_head, head_size)
        self.build(n_embd, n_head, head_size, bias)


class Heads(QKVProjection):
    """A module per head, with (D, C) query, key and value weights (Vaswani et al., figure 2)."""

    def build(self, C, H, D, bias):
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(C, D, bias) for _ in range(3)) for _ in range(H)
        )

    def parts(self, qkv, kind):
        for h, head in enumerate(self.heads):
            for linear, part in zip(head, qkv[:, h], strict=True):
                yield getattr(linear, kind), part  # (D, C), a bias (D,)

    def project(self, x):
        # 3 H small products (B, T, C) @ (C, D): easy to read, slow to run
        return [torch.stack([head[i](x) for head in self.heads], dim=1) for i in range(3)]


class Separate(QKVProjection):
    """Three (H*D, C) matrices. Head h owns rows h*D to (h+1)*D of each."""

    def build(self, C, H, D, bias):
        self.linears = nn.ModuleList(nn.Linear(C, H * D, bias) for _ in range(3))

    def parts(self, qkv, kind):
        for linear, part in zip(self.linears, qkv, strict=True):
            yield getattr(linear, kind), part  # (H, D, C), a bias (H, D)

    def project(self, x):
        return [split_heads(linear(x), self.n_head) for linear in self.linears]


class Fused(QKVProjection):
    """One (3*H*D, C) matrix: all queries, then all keys, then all values (GPT-2, nanoGPT)."""

    def build(self, C, H, D, bias):
        self.linear = nn.Linear(C, 3 * H * D, bias)

    def parts(self, qkv, kind):
        yield getattr(self.linear, kind), qkv  # (3, H, D, C), a bias (3, H, D)

    def project(self, x):
        parts = self.linear(x).unflatten(-1, (3, self.n_head, -1))  # (B, T, 3, H, D)
        return parts.permute(2, 0, 3, 1, 4).unbind()  # three of (B, H, T, D)


class Interleaved(QKVProjection):
    """One (3*H*D, C) matrix: head 0's query, key and value, then head 1's, and so on (GPT-NeoX)."""

    def build(self, C, H, D, bias):
        self.linear = nn.Linear(C, H * 3 * D, bias)

    def parts(self, qkv, kind):
        yield getattr(self.linear, kind), qkv.transpose(0, 1)  # (H, 3, D, C), a bias (H, 3, D)

    def project(self, x):
        heads = split_heads(self.linear(x), self.n_head)  # (B, H, T, 3D)
        return heads.chunk(3, dim=-1)


class Stacked(QKVProjection):
    """Three (H, C, D) tensors: the matrices of the heads, stacked along a batch dimension."""

    def build(self, C, H, D, bias):
        self.weights = nn.ParameterList(INIT_STD * torch.randn(H, C, D) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(3 * H * D)) if bias else None

    def parts(self, qkv, kind):
        if kind == "bias":
            yield self.bias, qkv
        else:
            yield from zip(self.weights, qkv.mT, strict=True)  # each (H, C, D)

    def project(self, x):
        products = [x.unsqueeze(1) @ weight for weight in self.weights]  # (B, 1, T, C) @ (H, C, D)
        return add_bias(products, self.bias)


class Flattened(QKVProjection):
    """Three (C, H, D) tensors; for the product, H and D are flattened into one dimension."""

    def build(self, C, H, D, bias):
        self.weights = nn.ParameterList(INIT_STD * torch.randn(C, H, D) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(3 * H * D)) if bias else None

    def parts(self, qkv, kind):
        if kind == "bias":
            yield self.bias, qkv
        else:
            yield from zip(self.weights, qkv.permute(0, 3, 1, 2), strict=True)  # each (C, H, D)

    def project(self, x):
        products = [x @ weight.flatten(1) for weight in self.weights]  # (B, T, C) @ (C, H*D)
        return add_bias([split_heads(product, self.n_head) for product in products], self.bias)


def add_bias(products: list[Tensor], bias: Tensor | None) -> list[Tensor]:
    """Add the parts of a bias (3*H*D) to queries, keys and values, each (B, H, T, D)."""
    if bias is None:
        return products
    parts = bias.view(3, products[0].size(1), 1, -1)  # each (H, 1, D)
    return [product + part for product, part in zip(products, parts, strict=True)]


LAYOUTS: dict[str, type[QKVProjection]] = {
    "heads": Heads,
    "separate": Separate,
    "fused": Fused,
    "interleaved": Interleaved,
    "stacked": Stacked,
    "flattened": Flattened,
}

# -------------------------------------------------------------------------------- attention kernels

# Each kernel takes q (B, H, T, D), k and v (B, H, S, D), a boolean mask that broadcasts to
# (B, H, T, S) (True: may attend) or None, `causal`, and the probability p of dropping an attention
# weight. It returns (B, H, T, D). At most one of mask and `causal` is given.


def rms_norm(x: Tensor) -> Tensor:
    """Scale each row of (..., D) to a root mean square of 1 (Zhang and Sennrich 2019).

    It has no learned weights, and equals `F.rms_norm` up to rounding. Under autocast, that runs
    entirely in float32; here only the mean is in float32, which takes half the time.
    """
    float_dtype = torch.promote_types(x.dtype, torch.float32)
    mean_square = (x * x).mean(dim=-1, keepdim=True, dtype=float_dtype)
    return x * (mean_square + torch.finfo(float_dtype).eps).rsqrt().to(x.dtype)


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """Return (T, S): False where key s comes after query t.

    The T queries are the last T of the S tokens, so the diagonal is shifted S - T to the right.
    """
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) (Vaswani et al. 2017, equation 1).

    q (..., T, D) and k (..., S, D) give (..., T, S); each row sums to 1. `mask` is False where a
    query may not attend. `causal` hides from each query the tokens after it.
    """
    scores = (q / math.sqrt(q.size(-1))) @ k.mT  # scaling q takes less work than scaling the scores
    return masked_softmax(scores, mask, causal)


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Turn scores (..., T, S) into weights of the same shape; masked entries get weight 0."""
    if causal:
        mask = causal_mask(*scores.shape[-2:], scores.device)
    if mask is not None:
        # added, because an addition needs no pass of its own backward
        scores = scores + torch.where(mask, 0.0, -math.inf).to(scores.dtype)
    return scores.softmax(dim=-1)


def loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, p: float) -> Tensor:
    """Compute one head at a time, each on its own slice."""
    outputs = []
    for h in range(q.size(1)):
        mask_h = None if mask is None else mask.expand(*q.shape[:3], k.size(2))[:, h]
        weights = attention_weights(q[:, h], k[:, h], mask_h, causal)  # (B, T, S)
        outputs.append(dropout(weights, p) @ v[:, h])  # (B, T, D)
    return torch.stack(outputs, dim=1)


def bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, p: float) -> Tensor:
    """Fold the heads into the batch: every product is one `torch.bmm` over B*H matrices."""
    B, H = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B*H, T or S, D)
    scores = torch.bmm(q / math.sqrt(q.size(-1)), k.mT)  # (B*H, T, S)
    weights = masked_softmax(scores.unflatten(0, (B, H)), mask, causal)  # (B, H, T, S)
    y = torch.bmm(dropout(weights.flatten(0, 1), p), v)  # (B*H, T, D)
    return y.unflatten(0, (B, H))


def batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, p: float) -> Tensor:
    """Compute all heads at once: `@` broadcasts over the batch dimensions B and H."""
    return dropout(attention_weights(q, k, mask, causal), p) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, p: float) -> Tensor:
    """Call PyTorch's fused kernel: FlashAttention (Dao et al. 2022) where it is available."""
    if causal and q.size(2) < k.size(2):  # is_causal would align the triangle with the first key
        mask, causal = causal_mask(q.size(2), k.size(2), q.device), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]] = {
    "loop": loop,
    "bmm": bmm,
    "batched": batched,
    "sdpa": sdpa,
}


def fastest_kernel(dtype: torch.dtype, device: torch.device, S: int) -> str:
    """Return the name of the fastest kernel: `batched` for bfloat16 on a CPU, else `sdpa`.

    In bfloat16 on a CPU, the backward pass of sdpa is slow. But `batched` stores T*S weights for
    each head, so it is only for short contexts (docs/attention.md, section 9).
    """
    use_batched = dtype == torch.bfloat16 and device.type == "cpu" and S <= MAX_BATCHED_CONTEXT
    return "batched" if use_batched else "sdpa"


# --------------------------------------------------------------------------------------- the module


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2).

    Self-attention is `layer(x)`; in a GPT it is causal, `layer(x, causal=True)`. Cross-attention is
    `layer(x, context)` or `layer(x, keys, values)`.

    `head_size` D defaults to C // H, `out_features` to C. `dropout` applies to the output,
    `attention_dropout` to the attention weights. `rotary` rotates queries and keys by position.
    `qk_norm` normalizes both to length sqrt(D) (Henry et al. 2020), without parameters.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        *,
        layout: str = "fused",
        kernel: str = "sdpa",
        head_size: int | None = None,
        out_features: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        rotary: Rotary | None = None,
        qk_norm: bool = False,
    ):
        super().__init__()
        assert head_size or n_embd % n_head == 0, "n_head divides n_embd, or give head_size"
        head_size = head_size or n_embd // n_head

        self.qkv = LAYOUTS[layout](n_embd, n_head, head_size, bias)
        self.kernel = kernel
        self.out_proj = nn.Linear(n_head * head_size, out_features or n_embd, bias)
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.rotary, self.qk_norm = rotary, qk_norm

    def forward(
        self,
        x: Tensor,
        *contexts: Tensor,
        causal: bool = False,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Compute attention: x (B, T, C) -> (B, T, out_features).

        Without a context this is self-attention: each token attends to the tokens of `x` and of
        `cache`; with `causal`, to none after itself. With a context (B, S, C) it is
        cross-attention: each token attends to the tokens of the context. With two, the first has
        the keys and the second the values (as in torch.nn.MultiheadAttention; rarely needed).

        A boolean `mask`, in place of `causal`, broadcasts to (B, H, T, S): True where a query may
        attend. Each query needs at least one key: softmax over none is NaN.
        """
        assert mask is None or not causal, "give causal=True or a mask, not both"
        # what each token looks for, what it offers, and what it hands over; k, v are (B, H, S, D)
        q, k, v = self.queries_keys_values(x, *contexts, cache=cache)

        # each head averages the values by how well their keys fit
        causal = causal and q.size(2) > 1  # a single new token sees every key
        p = self.attention_dropout if self.training else 0.0
        name = self.kernel
        if name == "auto":
            name = fastest_kernel(q.dtype, q.device, k.size(2))
        y = KERNELS[name](q, k, v, mask, causal, p)  # (B, H, T, D)

        y = self.out_proj(merge_heads(y))  # (B, T, out_features)
        return dropout(y, self.dropout, self.training)

    def queries_keys_values(
        self, x: Tensor, *contexts: Tensor, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the kernel: q (B, H, T, D), k and v (B, H, S, D).

        QK-norm and rotation are applied; k and v include the tokens of `cache`. The attention maps
        of the layer are `attention_weights(q, k, causal=True)`. A cache is for self-attention.
        """
        q, k, v = self.qkv.project(x)  # each (B, H, T, D)
        if contexts:  # simple, but three times the work: only one part of each projection is used
            k = self.qkv.project(contexts[0])[1]
            v = self.qkv.project(contexts[-1])[2]

        if contexts:
            q, k = self.normalize_and_rotate(q), self.normalize_and_rotate(k)
        elif self.qk_norm or self.rotary is not None:  # both at once, in half the operations
            start = 0 if cache is None else cache.length
            q, k = self.normalize_and_rotate(torch.stack([q, k]), start)

        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)
        return q, k, v

    def normalize_and_rotate(self, x: Tensor, start: int = 0) -> Tensor:
        """Apply QK-norm and RoPE to queries or keys (..., T, D), the first at position `start`."""
        # QK-norm: only directions count, so the scores cannot grow without bound
        if self.qk_norm:
            x = rms_norm(x)
        return x if self.rotary is None else self.rotary(x, start)
