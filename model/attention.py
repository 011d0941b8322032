"""Multi-head attention, with two independent choices: where the weights live (a layout) and how the
heads attend (a kernel). Every pair computes the same function; docs/attention.md derives each from
the one before.

B batch, T tokens read now, S tokens attended to, C n_embd, H n_head, D head size
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.dropout import drop
from model.kv_cache import KVCache
from model.rotary import Rotary


def itself(parameter: Tensor) -> Tensor:
    return parameter


def split_heads(x: Tensor, n_head: int) -> Tensor:
    """(B, T, H*D) -> (B, H, T, D)"""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H*D)"""
    return x.transpose(1, 2).flatten(2)


# --------------------------------------------------------------------------- where the weights live


class Projection(nn.Module):
    """A layout: it builds the parameters of queries, keys and values, and answers two questions
    about them.
    """

    def __init__(self, n_embd: int, n_head: int, head_size: int, bias: bool):
        super().__init__()
        self.n_head = n_head
        with torch.random.fork_rng(
            devices=()
        ):  # what nn.Linear draws for itself, in some layouts, is not kept
            self.build(n_embd, n_head, head_size, bias)

    def build(self, C: int, H: int, D: int, bias: bool) -> None:
        """Make room for the parameters; their values are drawn through `head_weights`."""
        raise NotImplementedError

    def head_weights(self, h: int, of: Callable[[Tensor], Tensor] = itself) -> list[Tensor]:
        """Where are head h's query, key and value matrices, each (D, C), and with bias its three
        biases (D,)?

        They are views of `of(parameter)`: of the parameters themselves, or of whatever has their
        shapes, such as gradients and moments. Initialisation, conversion, optimizers and tests all
        ask this one question.
        """
        raise NotImplementedError

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """What are the queries, keys and values of a text? (B, T, C) -> three of (B, H, T, D)."""
        raise NotImplementedError


class Heads(Projection):
    """Each head a module of its own, with a (D, C) query, key and value."""

    def build(self, C, H, D, bias):
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(C, D, bias) for _ in range(3)) for _ in range(H)
        )

    def head_weights(self, h, of=itself):
        return [
            of(each) for each in sorted(self.heads[h].parameters(), key=Tensor.dim, reverse=True)
        ]

    def project(self, x):
        return [torch.stack([head[part](x) for head in self.heads], dim=1) for part in range(3)]


class Separate(Projection):
    """Three (H*D, C) matrices: head h owns rows h*D to (h+1)*D of each."""

    def build(self, C, H, D, bias):
        self.qkv = nn.ModuleList(nn.Linear(C, H * D, bias) for _ in range(3))

    def head_weights(self, h, of=itself):
        weights_then_biases = sorted(self.qkv.parameters(), key=Tensor.dim, reverse=True)
        return [of(each).unflatten(0, (self.n_head, -1))[h] for each in weights_then_biases]

    def project(self, x):
        return [split_heads(linear(x), self.n_head) for linear in self.qkv]


class Fused(Projection):
    """One (3*H*D, C) matrix: the queries of all heads, then their keys, then their values (GPT-2,
    nanoGPT).
    """

    def build(self, C, H, D, bias):
        self.qkv = nn.Linear(C, 3 * H * D, bias)

    def head_weights(self, h, of=itself):
        return [
            part
            for each in self.qkv.parameters()
            for part in of(each).unflatten(0, (3, self.n_head, -1))[:, h]
        ]

    def project(self, x):
        return [split_heads(part, self.n_head) for part in self.qkv(x).chunk(3, dim=-1)]


class Interleaved(Projection):
    """One (3*H*D, C) matrix: the query, key and value of head 0, then those of head 1, and so on
    (GPT-NeoX).
    """

    def build(self, C, H, D, bias):
        self.qkv = nn.Linear(C, H * 3 * D, bias)

    def head_weights(self, h, of=itself):
        return [
            part
            for each in self.qkv.parameters()
            for part in of(each).unflatten(0, (self.n_head, 3, -1))[h]
        ]

    def project(self, x):
        return split_heads(self.qkv(x), self.n_head).chunk(
            3, dim=-1
        )  # (B, H, T, 3D), then three of (B, H, T, D)


class Stacked(Projection):
    """Three (H, C, D) tensors: the heads are a batch dimension of the weights, and the text is
    broadcast over it.
    """

    def build(self, C, H, D, bias):
        self.weights = nn.ParameterList(torch.empty(H, C, D) for _ in range(3))
        self.biases = nn.ParameterList(torch.empty(H, 1, D) for _ in range(3 * bias))

    def head_weights(self, h, of=itself):
        return [of(weight)[h].T for weight in self.weights] + [
            of(bias)[h, 0] for bias in self.biases
        ]

    def project(self, x):
        return add_biases(
            [x.unsqueeze(1) @ weight for weight in self.weights], self.biases
        )  # (B, 1, T, C) @ (H, C, D)


class Unrolled(Projection):
    """Three (C, H, D) tensors, each viewed as one (C, H*D) matrix: one matmul a tensor, then a
    view.
    """

    def build(self, C, H, D, bias):
        self.weights = nn.ParameterList(torch.empty(C, H, D) for _ in range(3))
        self.biases = nn.ParameterList(torch.empty(H, 1, D) for _ in range(3 * bias))

    def head_weights(self, h, of=itself):
        return [of(weight)[:, h].T for weight in self.weights] + [
            of(bias)[h, 0] for bias in self.biases
        ]

    def project(self, x):
        products = [
            split_heads(x @ weight.flatten(1), self.n_head) for weight in self.weights
        ]  # (B, T, C) @ (C, H*D)
        return add_biases(products, self.biases)


def add_biases(products: list[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    return (
        [product + bias for product, bias in zip(products, biases, strict=True)]
        if len(biases)
        else products
    )


LAYOUTS: dict[str, type[Projection]] = {
    "heads": Heads,
    "separate": Separate,
    "fused": Fused,
    "interleaved": Interleaved,
    "stacked": Stacked,
    "unrolled": Unrolled,
}

# ----------------------------------------------------------------------------- how the heads attend


def unit_rms(x: Tensor) -> Tensor:
    """(..., D), each row scaled to a root mean square of 1: RMSNorm (Zhang and Sennrich 2019)
    without gains.

    `F.rms_norm` is the same, but under autocast it computes in float32 throughout, at twice the
    time.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    square = (x * x).mean(dim=-1, keepdim=True, dtype=wide)
    return x * (square + torch.finfo(wide).eps).rsqrt().to(x.dtype)


def causal_mask(T: int, S: int, like: Tensor) -> Tensor:
    """(T, S), -inf where key j comes after query i, else 0: the T queries are the last T of the S
    tokens.
    """
    return torch.full((T, S), -math.inf, dtype=like.dtype, device=like.device).triu(S - T + 1)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """How much each query attends to each key: softmax(q k^T / sqrt(D) + mask), Vaswani et al.
    2017, equation 1.

    q (..., T, D) and k (..., S, D) give (..., T, S), whose rows add up to 1. `mask` is additive,
    -inf where a query may not look; `causal` hides from each query what comes after it. A row that
    is hidden throughout is NaN.
    """
    scores = (q / math.sqrt(q.size(-1))) @ k.mT  # q is scaled: fewer numbers than the scores
    return masked_softmax(scores, mask, causal)


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Scores (..., T, S) -> weights of the same shape; what the mask or causality hides gets weight
    0.
    """
    if causal:
        scores = scores + causal_mask(*scores.shape[-2:], like=scores)
    return (scores if mask is None else scores + mask).softmax(dim=-1)


def loop(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """One head after the other, each on its own slice."""
    outputs = []
    for h in range(q.size(1)):
        mask_h = None if mask is None else mask.expand(-1, q.size(1), -1, -1)[:, h]
        weights = attention_weights(q[:, h], k[:, h], mask_h, causal)  # (B, T, S)
        outputs.append(drop(weights, dropout) @ v[:, h])
    return torch.stack(outputs, dim=1)


def bmm(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """The heads folded into the batch: every product is one `torch.bmm` over B*H matrices."""
    heads = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B*H, T or S, D)
    scores = torch.bmm(q / math.sqrt(q.size(-1)), k.mT)  # (B*H, T, S)
    weights = masked_softmax(scores.unflatten(0, heads), mask, causal).flatten(0, 1)
    return torch.bmm(drop(weights, dropout), v).unflatten(0, heads)


def batched(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """All heads at once, written out: `@` treats B and H as one batch of matrices."""
    return drop(attention_weights(q, k, mask, causal), dropout) @ v


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """PyTorch's fused kernel, which never stores the (T, S) weights where it can (Dao et al. 2022,
    FlashAttention).
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal
    )


# A kernel takes q (B, H, T, D), k and v (B, H, S, D), an additive mask (B or 1, H or 1, T, S) or
# None, whether a query may see no later key (only without a mask and with T = S), and the share of
# weights to drop. It returns (B, H, T, D).
KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]] = {
    "loop": loop,
    "bmm": bmm,
    "batched": batched,
    "sdpa": sdpa,
}

# --------------------------------------------------------------------------------------- the module


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): causal self-attention, or
    cross-attention.

    `head_size` D defaults to C // H and `out_features` to C. `dropout` acts on the output,
    `attention_dropout` on the weights. `rotary` turns queries and keys by their position; `qk_norm`
    scales both to length sqrt(D) (Henry et al. 2020, query-key normalisation; no parameters).
    ValueError for names and sizes that there are not.
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
        for what, name, table in (("layout", layout, LAYOUTS), ("kernel", kernel, KERNELS)):
            if name not in table:
                raise ValueError(f"no {what} {name!r}; allowed: {', '.join(table)}")
        if head_size is None and n_embd % n_head:
            raise ValueError(
                f"n_embd {n_embd} is not divisible by n_head {n_head}: change one, or give "
                f"head_size"
            )
        head_size = head_size or n_embd // n_head
        self.projection = LAYOUTS[layout](n_embd, n_head, head_size, bias)
        self.kernel = KERNELS[kernel]
        self.output = nn.Linear(n_head * head_size, out_features or n_embd, bias)
        self.n_embd, self.dropout, self.attention_dropout = n_embd, dropout, attention_dropout
        self.rotary, self.qk_norm = rotary, qk_norm
        self.reset_parameters()

    def reset_parameters(
        self, generator: torch.Generator | None = None, std: float = 0.02, output_std: float = 0.02
    ):
        """Draw each head's matrices in one order, so that one generator gives the same module in
        every layout.
        """
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

        Without a context the tokens of `x` attend to themselves and to what `cache` holds, each to
        none after it. With `context` (B, S, C) they attend to all of it: keys come from it, and
        values from `value_context` where given. `mask` narrows what may be attended to: boolean
        (True: may attend) or additive, of shape (T, S), (B, T, S) or (B, H, T, S), where B or H may
        be 1. A query that may attend to nothing gets zeros before the output projection. ValueError
        for shapes that do not fit.
        """
        q, k, v = self.queries_keys_values(x, context, value_context, cache)
        T, S = q.size(2), k.size(2)
        causal = (
            context is None and value_context is None and T > 1
        )  # a single query is the last: nothing is hidden
        dropout = self.attention_dropout if self.training else 0.0
        if mask is None and causal and T != S:
            mask = causal_mask(T, S, like=q)
        if mask is None:
            y = self.kernel(q, k, v, None, causal, dropout)
        else:
            mask = additive_mask(mask, q, S, causal)
            blind = mask.isneginf().all(dim=-1, keepdim=True)  # queries that may attend to nothing
            y = self.kernel(q, k, v, mask.masked_fill(blind, 0.0), False, dropout).masked_fill(
                blind, 0.0
            )
        return drop(self.output(merge_heads(y)), self.dropout, self.training)

    def queries_keys_values(
        self, x: Tensor, context=None, value_context=None, cache=None
    ) -> Sequence[Tensor]:
        """What the kernel sees of `forward`'s arguments: q (B, H, T, D), k and v (B, H, S, D), with
        norm, rotation and cache applied. `attention_weights(q, k, causal=True)` of them are the
        layer's attention maps.
        """
        if cache is not None and (context is not None or value_context is not None):
            raise ValueError(
                "a cache holds the text's own keys and values; attend to a context without one"
            )
        context = x if context is None else context
        value_context = context if value_context is None else value_context
        fits = (
            x.dim() == context.dim() == 3
            and x.size(2) == self.n_embd
            and context.shape[::2] == x.shape[::2]
        )
        if not fits or value_context.shape != context.shape:
            shapes = [tuple(text.shape) for text in (x, context, value_context)]
            raise ValueError(
                f"texts are {shapes}; must be x (B, T, {self.n_embd}) and contexts (B, S, "
                f"{self.n_embd})"
            )
        if x is context is value_context:
            q, k, v = self.projection.project(x)
        # each text is projected whole, and what is not asked of it left: plain, at up to three
        # times the cost
        else:
            q, k, v = (
                self.projection.project(text)[part]
                for part, text in enumerate((x, context, value_context))
            )
        if self.qk_norm:
            q, k = (unit_rms(t.contiguous()) for t in (q, k))
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
    """A mask of any accepted kind and shape, with causality worked in, as (B or 1, H or 1, T, S) to
    be added.
    """
    B, H, T, _ = q.shape
    full = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    fits = (
        full.dim() == 4
        and full.size(0) in (1, B)
        and full.size(1) in (1, H)
        and full.shape[2:] == (T, S)
    )
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"mask is {tuple(mask.shape)} {mask.dtype}; must be boolean (True: may attend) or "
            f"floating point (added), "
            f"and (T, S), (B, T, S) or (B, H, T, S) with B {B} or 1, H {H} or 1, T {T}, S {S}"
        )
    if mask.dtype == torch.bool:
        full = torch.where(full, 0.0, -math.inf)
    if causal:
        full = full + causal_mask(T, S, like=q)
    return full.to(q.dtype)
