"""Attention: every layout with every kernel computes what `reference` does.

All tests loop over LAYOUTS and KERNELS, so a new row of either table is tested at once.

B batch, T queries, S keys, C n_embd, H n_head, D head size
"""

import itertools
import math

import pytest
import torch

from configs import schema
from model.attention import KERNELS, LAYOUTS, MultiHeadAttention
from model.kv_cache import LayerCache
from model.parameters import named_tensors, set_tensors
from model.rotary import Rotary

PAIRS = list(itertools.product(LAYOUTS, KERNELS))
every_pair = pytest.mark.parametrize(("layout", "kernel"), PAIRS, ids=map("-".join, PAIRS))
B, T, S, C, H = 2, 4, 5, 6, 3


@pytest.fixture(autouse=True, scope="module")
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_mask(*shape):
    """A mask that hides some keys, but from no query all."""
    mask = randn(*shape, seed=5) > 0
    mask[..., 0] = True
    return mask


def make_layer(layout="fused", kernel="sdpa", *, rotary=False, **options):
    """A layer with large weights and biases, the same in every layout."""
    options["rotary"] = Rotary(options["head_size"], 16) if rotary else None
    layer = MultiHeadAttention(C, H, layout=layout, kernel=kernel, **options)
    tensors = enumerate(named_tensors(layer).items(), 10)
    set_tensors(layer, {name: randn(*each.shape, seed=i) / 2 for i, (name, each) in tensors})
    return layer


def reference(tensors, x, *contexts, causal=False, mask=None, **options):
    """Attention by its definition (Vaswani et al. 2017), from the tensors of a layer."""
    keys, *_, values = contexts * 2 or (x, x)
    biases = tensors.get("qkv.bias", torch.zeros(3, H, 1))
    q, k, v = (
        torch.einsum("hdc,btc->bhtd", weight, source) + bias[:, None]
        for weight, source, bias in zip(tensors["qkv"], (x, keys, values), biases, strict=True)
    )
    if options.get("qk_norm"):
        q, k = (each / each.square().mean(-1, keepdim=True).sqrt() for each in (q, k))
    if options.get("rotary"):
        q, k = turned(q), turned(k)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.size(-1))
    if causal:
        mask = torch.ones(T, T).tril() == 1
    weights = scores.exp() * (1.0 if mask is None else mask)
    y = weights @ v / weights.sum(-1, keepdim=True)
    out = tensors["out_proj"].unflatten(1, (H, -1))  # (out_features, H, D)
    return torch.einsum("bhtd,ohd->bto", y, out) + tensors.get("out_proj.bias", 0.0)


def turned(x):
    """RoPE: features i and i + D/2 are a complex number, turned by t * 10000^(-2i/D)."""
    T, D = x.shape[-2:]
    angles = torch.arange(T)[:, None] * 10_000 ** (-torch.arange(0, D, 2) / D)
    z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], dim=-1)


def assert_near(found, expected, tolerance=1e-12):
    assert found.shape == expected.shape and (found - expected).abs().max() < tolerance


SIZES = {"bias": True, "head_size": 5, "out_features": 7}
TURNED = {"bias": True, "head_size": 4, "qk_norm": True, "rotary": True}
CASES = (  # options of a layer, the lengths of x and its contexts, what hides keys
    ({}, [T], {"causal": True}),
    (SIZES, [T], {"mask": make_mask(T, T)}),
    (SIZES, [T, S, S], {"mask": make_mask(B, 1, T, S)}),
    (TURNED, [T], {"causal": True}),
    (TURNED, [T, S], {"mask": make_mask(1, H, T, S)}),
)


def gradients(y, inputs):
    """The gradients of a function of an output, by input."""
    total = (y * randn(*y.shape, seed=9)).sum()
    return dict(zip(inputs, torch.autograd.grad(total, inputs), strict=True))


@every_pair
def test_attention_equals_reference(layout, kernel):
    """In outputs and all gradients: self- and cross-attention, every mask."""
    for options, lengths, hiding in CASES:
        inputs = [randn(B, n, C, seed=i).requires_grad_() for i, n in enumerate(lengths)]
        layer = make_layer(layout, kernel, **options)
        tensors = {name: each.requires_grad_() for name, each in named_tensors(layer).items()}
        y = reference(tensors, *inputs, **hiding, **options)
        expected = [y, *gradients(y, [*inputs, *tensors.values()]).values()]
        y = layer(*inputs, **hiding)
        grads = gradients(y, [*inputs, *layer.parameters()])
        found = [y, *map(grads.get, inputs), *named_tensors(layer, grads).values()]
        for each, theirs in zip(found, expected, strict=True):
            assert_near(each, theirs)


def test_reference_equals_torch():
    """torch.nn.MultiheadAttention, in which True hides a key."""
    tensors = named_tensors(make_layer(bias=True))
    theirs = torch.nn.MultiheadAttention(C, H, batch_first=True)
    theirs.in_proj_weight.data = tensors["qkv"].flatten(0, 2)
    theirs.in_proj_bias.data = tensors["qkv.bias"].flatten()
    theirs.out_proj.weight.data = tensors["out_proj"]
    theirs.out_proj.bias.data = tensors["out_proj.bias"]
    x, keys, values = (randn(B, T, C, seed=i) for i in range(3))
    future = torch.ones(T, T).triu(1) == 1
    expected = theirs(x, keys, values, attn_mask=future)[0]
    assert_near(reference(tensors, x, keys, values, causal=True), expected)


@every_pair
def test_attention_in_bfloat16(layout, kernel):
    layer, x = make_layer(layout, kernel, **TURNED), randn(B, T, C)
    expected = layer(x, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer.float()(x.float(), causal=True)
    assert y.dtype == torch.bfloat16
    assert_near(y.double(), expected, 0.05)


@every_pair
def test_cache_equals_one_pass(layout, kernel):
    layer, x, cache = make_layer(layout, kernel, **TURNED), randn(B, 9, C), LayerCache(9)
    parts = [layer(part, causal=True, cache=cache) for part in x.split([4, 1, 3, 1], dim=1)]
    assert_near(torch.cat(parts, dim=1), layer(x, causal=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_of_attention_weights(kernel):
    """Each with the given probability; the others are scaled up."""
    equal, one_hot = torch.zeros(50, 4, 10, 1), torch.eye(10).expand(50, 4, 10, 10)
    torch.manual_seed(0)
    weights = KERNELS[kernel](equal, equal, one_hot, None, False, 0.3)  # (B, H, T, S)
    kept = weights != 0
    assert torch.allclose(weights[kept], torch.tensor(0.1 / 0.7))
    assert abs(kept.double().mean() - 0.7) < 0.02  # 6 standard deviations


def test_dropout_of_a_layer():
    """Of the output and of the weights; both are off in evaluation."""
    x, plain = randn(B, T, C), make_layer()(randn(B, T, C))
    torch.manual_seed(0)
    y = make_layer(dropout=0.5)(x)
    assert 0 < (y != 0).sum() < y.numel()
    assert_near(y[y != 0], 2 * plain[y != 0])
    assert not torch.equal(make_layer(attention_dropout=0.5)(x), plain)
    assert torch.equal(make_layer(dropout=0.5, attention_dropout=0.5).eval()(x), plain)


def test_layouts_and_kernels_of_settings():
    assert tuple(LAYOUTS) == schema.LAYOUTS and tuple(KERNELS) == schema.KERNELS
