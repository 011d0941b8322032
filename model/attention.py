"""Multi-head attention, with two independent choices: where the weights live (a layout) and how the heads attend
(a kernel). Every pair computes the same function; docs/attention.md derives each from the one before.

B batch, T tokens read now, S tokens attended to, C n_embd, H n_head, D head size
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.cache import KVCache

Q, K, V, QKV = slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)


def itself(parameter: Tensor) -> Tensor:
    return parameter


def split_heads(x: Tensor, n_head: int) -> Tensor:
    """(B, T, H*D) -> (B, H, T, D)"""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H*D)"""
    return x.transpose(1, 2).flatten(2)


# ---------------------------------------------------------------------------------- where the weights live


class Projection(nn.Module):
    """Queries, keys and values of a text. A layout is a subclass that answers two questions.

    `head_weights(h, of)`: where are head h's query, key and value matrices, each (D, C), and with bias its three
    biases (D,)? They are views of `of(parameter)`: of the parameters themselves, or of whatever has their shapes, such
    as gradients and moments. Initialisation, conversion, optimizers and tests all ask this one question.

    `project(x, parts)`: those of queries, keys and values that `parts`, a slice of the three, names: x is (B, T, C),
    each result (B, H, T, D).
    """

    def __init__(self, n_embd: int, n_head: int, head_size: int, bias: bool):
        super().__init__()
        self.n_embd, self.n_head, self.head_size = n_embd, n_head, head_size
        self.build(n_head * head_size, bias)

    def build(self, width: int, bias: bool) -> None:
        """Make the parameters; `width` is H*D. Their values come from `head_weights` later."""
        raise NotImplementedError

    def head_weights(self, h: int, of: Callable[[Tensor], Tensor] = itself) -> list[Tensor]:
        raise NotImplementedError

    def project(self, x: Tensor, parts: slice) -> Sequence[Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor, context: Tensor, value_context: Tensor) -> Sequence[Tensor]:
        """Queries (B, H, T, D) of `x`; keys and values (B, H, S, D) of the contexts (B, S, C)."""
        if x is context is value_context:
            return self.project(x, QKV)
        return *self.project(x, Q), *self.project(context, K), *self.project(value_context, V)


class Heads(Projection):
    """Each head a module of its own, with a (D, C) query, key and value."""

    def build(self, width, bias):
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(self.n_embd, self.head_size, bias) for _ in range(3)) for _ in range(self.n_head)
        )

    def head_weights(self, h, of=itself):
        head = self.heads[h]
        return [of(part.weight) for part in head] + [of(part.bias) for part in head if part.bias is not None]

    def project(self, x, parts):
        return [torch.stack([head[part](x) for head in self.heads], dim=1) for part in range(3)[parts]]


class Separate(Projection):
    """Three (H*D, C) matrices: head h owns rows h*D to (h+1)*D of each."""

    def build(self, width, bias):
        self.qkv = nn.ModuleList(nn.Linear(self.n_embd, width, bias) for _ in range(3))

    def head_weights(self, h, of=itself):
        tensors = [part.weight for part in self.qkv] + [part.bias for part in self.qkv if part.bias is not None]
        return [of(tensor).unflatten(0, (self.n_head, -1))[h] for tensor in tensors]

    def project(self, x, parts):
        return [split_heads(part(x), self.n_head) for part in list(self.qkv)[parts]]


class Fused(Projection):
    """One (3*H*D, C) matrix: the queries of all heads, then their keys, then their values (GPT-2, nanoGPT)."""

    def build(self, width, bias):
        self.qkv = nn.Linear(self.n_embd, 3 * width, bias)

    def head_weights(self, h, of=itself):
        tensors = [of(tensor).unflatten(0, (3, self.n_head, -1)) for tensor in self.qkv.parameters()]
        return [part for tensor in tensors for part in tensor[:, h]]

    def project(self, x, parts):
        weight, bias = (
            None if tensor is None else tensor.unflatten(0, (3, -1))[parts].flatten(0, 1)
            for tensor in (self.qkv.weight, self.qkv.bias)
        )
        width = self.n_head * self.head_size
        return [split_heads(part, self.n_head) for part in F.linear(x, weight, bias).split(width, dim=-1)]


class Interleaved(Projection):
    """One (3*H*D, C) matrix: the query, key and value of head 0, then those of head 1, and so on (GPT-NeoX)."""

    def build(self, width, bias):
        self.qkv = nn.Linear(self.n_embd, 3 * width, bias)

    def head_weights(self, h, of=itself):
        tensors = [of(tensor).unflatten(0, (self.n_head, 3, -1)) for tensor in self.qkv.parameters()]
        return [part for tensor in tensors for part in tensor[h]]

    def project(self, x, parts):
        weight, bias = (
            None if tensor is None else tensor.unflatten(0, (self.n_head, 3, -1))[:, parts].flatten(0, 2)
            for tensor in (self.qkv.weight, self.qkv.bias)
        )
        return split_heads(F.linear(x, weight, bias), self.n_head).split(self.head_size, dim=-1)


class Stacked(Projection):
    """Three (H, C, D) tensors: the heads are a batch dimension of the weights, and the text is broadcast over it."""

    def build(self, width, bias):
        H, C, D = self.n_head, self.n_embd, self.head_size
        self.weights = nn.ParameterList(torch.empty(H, C, D) for _ in range(3))
        self.biases = nn.ParameterList(torch.empty(H, 1, D) for _ in range(3 * bias))

    def head_weights(self, h, of=itself):
        return [of(weight)[h].T for weight in self.weights] + [of(bias)[h, 0] for bias in self.biases]

    def project(self, x, parts):
        x = x.unsqueeze(1)  # (B, 1, T, C) @ (H, C, D) -> (B, H, T, D)
        products = [x @ weight for weight in list(self.weights)[parts]]
        biases = list(self.biases)[parts]
        return [product + bias for product, bias in zip(products, biases, strict=True)] if biases else products


class Unrolled(Projection):
    """Three (C, H, D) tensors, each viewed as one (C, H*D) matrix: one matmul a tensor, then a view."""

    def build(self, width, bias):
        H, C, D = self.n_head, self.n_embd, self.head_size
        self.weights = nn.ParameterList(torch.empty(C, H, D) for _ in range(3))
        self.biases = nn.ParameterList(torch.empty(H, D) for _ in range(3 * bias))

    def head_weights(self, h, of=itself):
        return [of(weight)[:, h].T for weight in self.weights] + [of(bias)[h] for bias in self.biases]

    def project(self, x, parts):
        products = [x @ weight.flatten(1) for weight in list(self.weights)[parts]]  # (B, T, C) @ (C, H*D)
        biases = list(self.biases)[parts]
        if biases:
            products = [product + bias.flatten() for product, bias in zip(products, biases, strict=True)]
        return [split_heads(product, self.n_head) for product in products]


LAYOUTS: dict[str, type[Projection]] = {
    "heads": Heads,
    "separate": Separate,
    "fused": Fused,
    "interleaved": Interleaved,
    "stacked": Stacked,
    "unrolled": Unrolled,
}

# ----------------------------------------------------------------------------------- how the heads attend


def causal_mask(T: int, S: int, device: torch.device | None = None) -> Tensor:
    """(T, S), True where query i may see key j: the T queries are the last T of the S tokens."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """How much each query attends to each key: softmax(q k^T / sqrt(D) + mask), Vaswani et al. 2017, equation 1.

    q (..., T, D) and k (..., S, D) give (..., T, S), whose rows add up to 1. `mask` is additive, -inf where a query
    may not look; `causal` hides from each query what comes after it.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if causal:
        scores = scores.masked_fill(~causal_mask(*scores.shape[-2:], device=q.device), -math.inf)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(dim=-1)


def loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """One head after the other, each on its own slice."""
    outputs = []
    for h in range(q.size(1)):
        mask_h = None if mask is None else mask.expand(-1, q.size(1), -1, -1)[:, h]
        weights = attention_weights(q[:, h], k[:, h], mask_h, causal)  # (B, T, S)
        outputs.append(F.dropout(weights, dropout) @ v[:, h])
    return torch.stack(outputs, dim=1)


def bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """The heads folded into the batch: every product is one `torch.bmm` over B*H matrices."""
    B, H, T, D = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B*H, T or S, D)
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)  # (B*H, T, S)
    if causal:
        scores = scores.masked_fill(~causal_mask(T, k.size(1), q.device), -math.inf)
    if mask is not None:
        scores = scores + mask.expand(B, H, -1, -1).flatten(0, 1)
    return torch.bmm(F.dropout(scores.softmax(dim=-1), dropout), v).unflatten(0, (B, H))


def batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """All heads at once, written out: `@` treats B and H as one batch of matrices."""
    return F.dropout(attention_weights(q, k, mask, causal), dropout) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """PyTorch's fused kernel, which never stores the (T, S) weights where it can (Dao et al. 2022, FlashAttention)."""
    T, S = q.size(2), k.size(2)
    if causal and (mask is not None or T != S):  # its own triangle counts from the first key, ours from the last
        hidden = torch.zeros(T, S, dtype=q.dtype, device=q.device).masked_fill(~causal_mask(T, S, q.device), -math.inf)
        mask, causal = hidden if mask is None else hidden + mask, False
    mask = None if mask is None else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)


# q (B, H, T, D), k and v (B, H, S, D), additive mask (B or 1, H or 1, T, S) or None -> (B, H, T, D)
KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]] = {
    "loop": loop,
    "bmm": bmm,
    "batched": batched,
    "sdpa": sdpa,
}

# ------------------------------------------------------------------------------------------- the module


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2): each pair of a head's coordinates turns by
    an angle that grows with the position, so that q . k depends on how far apart the two tokens are.

    The pairs are (i, i + D/2), as in GPT-NeoX.
    """

    def __init__(self, head_size: int, max_positions: int, base: float = 10_000.0):
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies  # (positions, D/2)
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", torch.cat([cos, cos], dim=1).to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], dim=1).to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """(B, H, T, D) -> the same shape; the first of the T tokens stands at position `start`."""
        span = slice(start, start + x.size(2))
        cos, sin = self.cos[span].to(x.dtype), self.sin[span].to(x.dtype)
        return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): causal self-attention, or cross-attention.

    `head_size` D defaults to C // H and `out_features` to C. `dropout` acts on the output, `attention_dropout` on the
    weights. `rotary` turns queries and keys by their position; `qk_norm` scales both to length sqrt(D) (Henry et al.
    2020, query-key normalisation; no parameters).
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
        if head_size is None and n_embd % n_head:
            raise ValueError(f"n_embd {n_embd} is not divisible by n_head {n_head}: change one, or give head_size")
        head_size = head_size or n_embd // n_head
        self.projection = _named("layout", LAYOUTS, layout)(n_embd, n_head, head_size, bias)
        self.kernel = _named("kernel", KERNELS, kernel)
        self.output = nn.Linear(n_head * head_size, out_features or n_embd, bias)
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.rotary, self.qk_norm = rotary, qk_norm
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(
        self, generator: torch.Generator | None = None, std: float = 0.02, output_std: float = 0.02
    ) -> None:
        """Draw each head's matrices in one order, so that one generator gives the same module in every layout."""
        for h in range(self.projection.n_head):
            for view in self.projection.head_weights(h):
                draw_(view, std if view.dim() == 2 else 0.0, generator)
        for parameter in self.output.parameters():
            draw_(parameter, output_std if parameter.dim() == 2 else 0.0, generator)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value_context: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """x (B, T, C) -> (B, T, out_features).

        Without a context the tokens of `x` attend to themselves and to what `cache` holds, each to none after it.
        With `context` (B, S, C) they attend to all of it: keys come from it, and values from `value_context` where
        given. `mask` narrows what may be attended to: boolean (True: may attend) or additive, of shape (T, S),
        (B, T, S) or (B, H, T, S), where B or H may be 1. A query that may attend to nothing gets zeros before the
        output projection. ValueError for shapes that do not fit.
        """
        q, k, v = self.queries_keys_values(x, context, value_context, cache)
        causal = context is None and value_context is None
        dropout = self.attention_dropout if self.training else 0.0
        if mask is None:
            y = self.kernel(q, k, v, None, causal and q.size(2) > 1, dropout)
        else:
            mask = additive_mask(mask, q, k.size(2), causal)
            blind = mask.isneginf().all(dim=-1, keepdim=True)  # queries that may attend to nothing
            y = self.kernel(q, k, v, mask.masked_fill(blind, 0.0), False, dropout).masked_fill(blind, 0.0)
        return F.dropout(self.output(merge_heads(y)), self.dropout, self.training)

    def queries_keys_values(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value_context: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernel sees: q (B, H, T, D), k and v (B, H, S, D), with norm, rotation and cache applied.

        `attention_weights(q, k, causal=True)` of these are the layer's attention maps.
        """
        if cache is not None and (context is not None or value_context is not None):
            raise ValueError("a cache holds the text's own keys and values; attend to a context without one")
        context = x if context is None else context
        value_context = context if value_context is None else value_context
        _check_inputs(x, context, value_context, self.projection.n_embd)
        q, k, v = self.projection(x, context, value_context)
        if self.qk_norm:
            q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))
        if self.rotary is not None:
            start = 0 if cache is None else cache.length
            q, k = self.rotary(q, start), self.rotary(k, start)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v


@torch.no_grad()
def draw_(view: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill `view` from N(0, std^2), the same numbers whatever its strides and dtype."""
    view.copy_(torch.empty(view.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))


def additive_mask(mask: Tensor, q: Tensor, S: int, causal: bool) -> Tensor:
    """A mask of any accepted kind and shape, with causality worked in, as (B or 1, H or 1, T, S) to be added."""
    B, H, T, _ = q.shape
    if mask.dim() not in (2, 3, 4) or mask.shape[-2:] != (T, S):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; allowed: ({T}, {S}), (B, {T}, {S}), (B, H, {T}, {S})")
    full = mask.unsqueeze(1) if mask.dim() == 3 else mask.expand(1, 1, -1, -1) if mask.dim() == 2 else mask
    if full.size(0) not in (1, B) or full.size(1) not in (1, H):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; its B must be 1 or {B}, and its H 1 or {H}")
    if mask.dtype == torch.bool:
        full = torch.zeros(full.shape, dtype=q.dtype, device=q.device).masked_fill(~full, -math.inf)
    elif not mask.is_floating_point():
        raise ValueError(f"mask has dtype {mask.dtype}; allowed: bool (True: may attend) or floating point (added)")
    return full.masked_fill(~causal_mask(T, S, q.device), -math.inf) if causal else full


def _named(what: str, table: dict, name: str):
    if name not in table:
        raise ValueError(f"no {what} {name!r}; allowed: {', '.join(table)}")
    return table[name]


def _check_inputs(x: Tensor, context: Tensor, value_context: Tensor, n_embd: int) -> None:
    for name, t in (("x", x), ("context", context), ("value_context", value_context)):
        if t.dim() != 3 or t.size(-1) != n_embd or t.size(0) != x.size(0):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; must be (B, tokens, {n_embd}) with one B for all")
    if context.size(1) != value_context.size(1):
        raise ValueError(f"context has {context.size(1)} tokens, value_context {value_context.size(1)}; must be equal")
