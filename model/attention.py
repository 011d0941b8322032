"""Multi-head attention with two independent settings: the weight layout and the attention kernel.

The layout decides how the query, key and value weights are stored, the kernel how attention is
computed from queries, keys and values. All pairs of the two compute the same function.
docs/attention.md derives each one step by step.

Start at `MultiHeadAttention.forward`, near the end, then read one layout, `Fused`, and one kernel,
`batched`. The others are variations of these.

B batch, T new tokens (queries), S total tokens (keys), C n_embd, H n_head, D head size
"""

import math
from collections.abc import Callable, Iterator, Sequence

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

    A layout is a subclass with three methods. `build` creates the parameters, `project` applies
    them, and `split` says which part of qkv each of them stores. With `split` alone,
    model/parameters.py copies the parameters to and from qkv, for initialization, checkpoints,
    optimizers, the page and convert.py.
    """

    def __init__(self, n_embd: int, n_head: int, head_size: int, bias: bool):
        super().__init__()
        self.n_head = n_head
        self.shapes = {"weight": (3, n_head, head_size, n_embd)}
        if bias:
            self.shapes["bias"] = (3, n_head, head_size)
        self.build(n_embd, n_head, head_size, bias)

    def build(self, C: int, H: int, D: int, bias: bool) -> None:
        """Create the parameters. A GPT draws their values anew, the same in every layout."""
        raise NotImplementedError

    def split(self, qkv: Tensor, kind: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter, and the part of qkv that it stores: a view, in the same order.

        For the `kind` weight, qkv is (3, H, D, C), for bias (3, H, D). The kinds are the names that
        nn.Linear gives to its parameters.
        """
        raise NotImplementedError

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Compute queries, keys and values: (B, T, C) -> three of (B, H, T, D)."""
        raise NotImplementedError


class Heads(QKVProjection):
    """A module per head, with (D, C) query, key and value weights (Vaswani et al., figure 2)."""

    def build(self, C, H, D, bias):
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(C, D, bias) for _ in range(3)) for _ in range(H)
        )

    def split(self, qkv, kind):
        for h, head in enumerate(self.heads):
            for linear, part in zip(head, qkv[:, h], strict=True):
                yield getattr(linear, kind), part  # (D, C), a bias (D,)

    def project(self, x):
        # 3 H small products (B, T, C) @ (C, D): easy to read, slow to run
        return [torch.stack([head[i](x) for head in self.heads], dim=1) for i in range(3)]


class Separate(QKVProjection):
    """Three (H*D, C) matrices. Head h owns rows h*D to (h+1)*D of each."""

    def build(self, C, H, D, bias):
        self.qkv = nn.ModuleList(nn.Linear(C, H * D, bias) for _ in range(3))

    def split(self, qkv, kind):
        for linear, part in zip(self.qkv, qkv, strict=True):
            yield getattr(linear, kind), part  # (H, D, C), a bias (H, D)

    def project(self, x):
        return [split_heads(linear(x), self.n_head) for linear in self.qkv]


class Fused(QKVProjection):
    """One (3*H*D, C) matrix: all queries, then all keys, then all values (GPT-2, nanoGPT)."""

    def build(self, C, H, D, bias):
        self.qkv = nn.Linear(C, 3 * H * D, bias)

    def split(self, qkv, kind):
        yield getattr(self.qkv, kind), qkv  # (3, H, D, C), a bias (3, H, D)

    def project(self, x):
        return [split_heads(part, self.n_head) for part in self.qkv(x).chunk(3, dim=-1)]


class Interleaved(QKVProjection):
    """One (3*H*D, C) matrix: head 0's query, key and value, then head 1's, and so on (GPT-NeoX)."""

    def build(self, C, H, D, bias):
        self.qkv = nn.Linear(C, H * 3 * D, bias)

    def split(self, qkv, kind):
        yield getattr(self.qkv, kind), qkv.transpose(0, 1)  # (H, 3, D, C), a bias (H, 3, D)

    def project(self, x):
        heads = split_heads(self.qkv(x), self.n_head)  # (B, H, T, 3D)
        return heads.chunk(3, dim=-1)


class Stacked(QKVProjection):
    """Three (H, C, D) tensors: the matrices of the heads, stacked along a batch dimension."""

    def build(self, C, H, D, bias):
        self.weights = nn.ParameterList(INIT_STD * torch.randn(H, C, D) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(3 * H * D)) if bias else None

    def split(self, qkv, kind):
        if kind == "bias":
            yield self.bias, qkv
        else:
            yield from zip(self.weights, qkv.mT, strict=True)  # each (H, C, D)

    def project(self, x):
        products = [x.unsqueeze(1) @ weight for weight in self.weights]  # (B, 1, T, C) @ (H, C, D)
        return add_bias(products, self.bias)


class Unrolled(QKVProjection):
    """Three (C, H, D) tensors; for the product, H and D are unrolled into one dimension."""

    def build(self, C, H, D, bias):
        self.weights = nn.ParameterList(INIT_STD * torch.randn(C, H, D) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(3 * H * D)) if bias else None

    def split(self, qkv, kind):
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
    "unrolled": Unrolled,
}

# -------------------------------------------------------------------------------- attention kernels

# Each kernel takes q (B, H, T, D), k and v (B, H, S, D), an additive mask (B or 1, H or 1, T, S) or
# None, `causal`, and the probability of dropping an attention weight. It returns (B, H, T, D). At
# most one of mask and `causal` is given, and `causal` only if T = S.


def rms_norm(x: Tensor) -> Tensor:
    """Scale each row of (..., D) to a root mean square of 1 (Zhang and Sennrich 2019).

    It has no learned weights, and equals `F.rms_norm` up to rounding. Under autocast, that runs
    entirely in float32; here only the mean is in float32, which takes half the time.
    """
    float_dtype = torch.promote_types(x.dtype, torch.float32)
    mean_square = (x * x).mean(dim=-1, keepdim=True, dtype=float_dtype)
    return x * (mean_square + torch.finfo(float_dtype).eps).rsqrt().to(x.dtype)


def causal_mask(T: int, S: int, like: Tensor) -> Tensor:
    """Return (T, S): -inf where key s comes after query t, else 0.

    The T queries are the last T of the S tokens, so the diagonal is shifted S - T to the right.
    """
    mask = torch.full((T, S), -math.inf, dtype=like.dtype, device=like.device)
    return mask.triu(S - T + 1)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute softmax(q k^T / sqrt(D) + mask) (Vaswani et al. 2017, equation 1).

    q (..., T, D) and k (..., S, D) give (..., T, S); each row sums to 1. `mask` is additive, -inf
    where a query may not attend. `causal` hides from each query the tokens after it. A row that is
    fully masked is NaN.
    """
    scores = (q / math.sqrt(q.size(-1))) @ k.mT  # scaling q takes less work than scaling the scores
    return masked_softmax(scores, mask, causal)


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Turn scores (..., T, S) into weights of the same shape; masked entries get weight 0."""
    if causal:
        scores = scores + causal_mask(*scores.shape[-2:], like=scores)
    return (scores if mask is None else scores + mask).softmax(dim=-1)


def loop(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> Tensor:
    """Compute one head at a time, each on its own slice."""
    outputs = []
    for h in range(q.size(1)):
        mask_h = None if mask is None else mask.expand(-1, q.size(1), -1, -1)[:, h]
        weights = attention_weights(q[:, h], k[:, h], mask_h, causal)  # (B, T, S)
        outputs.append(dropout(weights, dropout_p) @ v[:, h])  # (B, T, D)
    return torch.stack(outputs, dim=1)


def bmm(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> Tensor:
    """Fold the heads into the batch: every product is one `torch.bmm` over B*H matrices."""
    B, H = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B*H, T or S, D)
    scores = torch.bmm(q / math.sqrt(q.size(-1)), k.mT)  # (B*H, T, S)
    weights = masked_softmax(scores.unflatten(0, (B, H)), mask, causal)  # (B, H, T, S)
    y = torch.bmm(dropout(weights.flatten(0, 1), dropout_p), v)  # (B*H, T, D)
    return y.unflatten(0, (B, H))


def batched(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> Tensor:
    """Compute all heads at once: `@` broadcasts over the batch dimensions B and H."""
    return dropout(attention_weights(q, k, mask, causal), dropout_p) @ v


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> Tensor:
    """Call PyTorch's fused kernel: FlashAttention (Dao et al. 2022) where it is available."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal
    )


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


def auto(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> Tensor:
    """Call the fastest kernel for these inputs."""
    kernel = KERNELS[fastest_kernel(q.dtype, q.device, k.size(2))]
    return kernel(q, k, v, mask, causal, dropout_p)


# --------------------------------------------------------------------------------------- the module


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2).

    Self-attention, `layer(x)`, is causal; cross-attention, `layer(x, context)`, is not. So
    `layer(x, x)` is self-attention without the causal mask.

    `head_size` D defaults to C // H, `out_features` to C. `dropout` applies to the output,
    `attention_dropout` to the attention weights. `rotary` rotates queries and keys by position.
    `qk_norm` normalizes both to length sqrt(D) (Henry et al. 2020), without parameters.

    Raises ValueError for an unknown layout or kernel, and if n_head does not divide n_embd and no
    head_size is given.
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
        kernels = KERNELS | {"auto": auto}
        for setting, name, table in (("layout", layout, LAYOUTS), ("kernel", kernel, kernels)):
            if name not in table:
                raise ValueError(f"unknown {setting} {name!r}; allowed: {', '.join(table)}")
        if head_size is None and n_embd % n_head:
            raise ValueError(
                f"n_embd {n_embd} is not divisible by n_head {n_head}; change one of them, "
                "or give head_size"
            )
        head_size = head_size or n_embd // n_head

        self.projection = LAYOUTS[layout](n_embd, n_head, head_size, bias)
        self.kernel = kernels[kernel]
        self.out_proj = nn.Linear(n_head * head_size, out_features or n_embd, bias)
        self.n_embd, self.dropout, self.attention_dropout = n_embd, dropout, attention_dropout
        self.rotary, self.qk_norm = rotary, qk_norm

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value_context: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Compute attention: x (B, T, C) -> (B, T, out_features).

        Without a context this is causal self-attention: each token attends to itself, to earlier
        tokens of `x` and to the tokens in `cache`. With `context` (B, S, C) it is cross-attention:
        every token attends to all of `context`. The values may come from elsewhere than the keys
        (`value_context`, as in torch.nn.MultiheadAttention; rarely needed).

        `mask` restricts attention further: boolean (True: may attend) or additive, of shape (T, S),
        (B, T, S) or (B, H, T, S), where B or H may be 1. A query that may attend to nothing gets
        zeros before the output projection.

        Raises ValueError for shapes that do not fit.
        """
        # what each token looks for, what it offers, and what it hands over; k, v are (B, H, S, D)
        q, k, v = self.queries_keys_values(x, context, value_context, cache)

        # each head averages the values by how well their keys fit
        self_attention = context is None and value_context is None
        y = self._attend(q, k, v, mask, causal=self_attention)  # (B, H, T, D)

        y = self.out_proj(merge_heads(y))  # (B, T, out_features)
        return dropout(y, self.dropout, self.training)

    def queries_keys_values(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value_context: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the kernel: q (B, H, T, D), k and v (B, H, S, D).

        QK-norm and rotation are applied; k and v include the tokens of `cache`. The attention maps
        of the layer are `attention_weights(q, k, causal=True)`.

        Raises ValueError for shapes that do not fit, and for a cache with a context.
        """
        if cache is not None and (context is not None or value_context is not None):
            raise ValueError("a cache is for self-attention; omit it, or the contexts")

        context = x if context is None else context
        value_context = context if value_context is None else value_context
        self._check_shapes(x, context, value_context)

        if x is context is value_context:
            q, k, v = self.projection.project(x)  # each (B, H, T, D)
        else:
            # simple, but up to three times the work: only one part of each projection is used
            q = self.projection.project(x)[0]
            k = self.projection.project(context)[1]
            v = self.projection.project(value_context)[2]

        # QK-norm: only directions count, so the scores cannot grow without bound
        if self.qk_norm:
            q, k = rms_norm(q.contiguous()), rms_norm(k.contiguous())

        if self.rotary is not None:
            start = 0 if cache is None else cache.length
            q, k = self.rotary(q, start), self.rotary(k, start)

        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Run the kernel with `mask` and the causal mask combined: (B, H, T, D)."""
        T, S = q.size(2), k.size(2)
        dropout_p = self.attention_dropout if self.training else 0.0
        causal = causal and T > 1  # decoding one token: it may attend to every key

        # a kernel can only apply causality itself if T = S
        if mask is None and (T == S or not causal):
            return self.kernel(q, k, v, None, causal, dropout_p)
        if mask is None:
            return self.kernel(q, k, v, causal_mask(T, S, like=q)[None, None], False, dropout_p)

        mask = additive_mask(mask, q, S, causal)  # (B or 1, H or 1, T, S)
        fully_masked = mask.isneginf().all(dim=-1, keepdim=True)  # softmax would give NaN
        y = self.kernel(q, k, v, mask.masked_fill(fully_masked, 0.0), False, dropout_p)
        return y.masked_fill(fully_masked, 0.0)

    def _check_shapes(self, x: Tensor, context: Tensor, value_context: Tensor) -> None:
        """Raise ValueError unless x is (B, T, C) and both contexts are (B, S, C)."""
        fits = x.dim() == context.dim() == 3
        fits = fits and x.size(2) == context.size(2) == self.n_embd
        fits = fits and x.size(0) == context.size(0) and value_context.shape == context.shape
        if not fits:
            shapes = [tuple(tensor.shape) for tensor in (x, context, value_context)]
            raise ValueError(
                f"x, context and value_context have shapes {shapes}; "
                f"allowed: x (B, T, {self.n_embd}), contexts (B, S, {self.n_embd})"
            )


def additive_mask(mask: Tensor, q: Tensor, S: int, causal: bool) -> Tensor:
    """Convert any accepted mask, combined with causality, to an additive (B or 1, H or 1, T, S)."""
    B, H, T, _ = q.shape
    # a dimension that is missing gets size 1: all heads, or all texts, share the mask
    full = mask
    if mask.dim() == 2:
        full = mask[None, None]
    elif mask.dim() == 3:
        full = mask[:, None]

    fits = full.dim() == 4 and full.size(0) in (1, B) and full.size(1) in (1, H)
    fits = fits and full.shape[2:] == (T, S)
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"mask is {tuple(mask.shape)} {mask.dtype}; allowed: boolean (True: may attend) or "
            f"floating point (added), of shape (T, S), (B, T, S) or (B, H, T, S) "
            f"with B {B} or 1, H {H} or 1, T {T}, S {S}"
        )

    if mask.dtype == torch.bool:
        full = torch.where(full, 0.0, -math.inf)
    if causal:
        full = full + causal_mask(T, S, like=q)
    return full.to(q.dtype)
