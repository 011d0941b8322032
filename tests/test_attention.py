"""Attention: every layout with every kernel computes what `reference` does.

All tests loop over LAYOUTS and KERNELS, so a new row of either table is tested at once.

B batch, T queries, S keys, C n_embd, H n_head, D head size
"""

import functools
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
OPTIONS = (  # of a layer
    {},
    {"bias": True, "head_size": 5, "out_features": 7},
    {"bias": True, "head_size": 4, "qk_norm": True, "rotary": True},
)
CONTEXTS = (0, 1, 2)  # how many
MASKS = (None, "causal", (), (B, 1), (1, H))  # the shape, without T and S
CASES = list(itertools.product(range(len(OPTIONS)), CONTEXTS, MASKS))
TOLERANCE = 1e-12  # in float64


@pytest.fixture(autouse=True, scope="module")
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def randn(*shape, seed=0):
    """Draw float64 values that float32 represents exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).double()


def make_mask(*shape):
    """A mask that hides some keys, but from no query all."""
    mask = randn(*shape, seed=5) > 0
    mask[..., 0] = True
    return mask


def make_inputs(contexts=0, mask=None):
    """The arguments of a layer: x, then contexts; and what hides keys."""
    texts = [randn(B, T, C), *(randn(B, S, C, seed=seed) for seed in range(1, 1 + contexts))]
    hiding = {"causal": True} if mask == "causal" else {}
    if isinstance(mask, tuple):
        hiding = {"mask": make_mask(*mask, T, S if contexts else T)}
    return [text.requires_grad_() for text in texts], hiding


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
    q, k, v = (
        torch.einsum("hdc,btc->bhtd", weight, source) + bias[:, None]
        for weight, source, bias in zip(
            tensors["qkv"],
            (x, keys, values),
            tensors.get("qkv.bias", torch.zeros(3, H, 1)),
            strict=True,
        )
    )
    if options.get("qk_norm"):
        q, k = (each / each.square().mean(-1, keepdim=True).sqrt() for each in (q, k))
    if options.get("rotary"):
        q, k = turned(q), turned(k)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.size(-1))
    if causal:
        mask = torch.ones(scores.shape[-2:]).tril(k.size(2) - q.size(2)) == 1
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


def gradients(y, inputs):
    """The gradients of a function of an output."""
    (y * randn(*y.shape, seed=9)).sum().backward()
    return [each.grad for each in inputs]


def assert_near(found, expected, tolerance, label=""):
    """Compare tensors, relative to the larger of 1 and the norm of the expected one."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape, f"{label}: tensor {i} has shape {tuple(a.shape)}"
        error = (a.double() - b.double()).norm() / max(1, b.double().norm())
        assert error <= tolerance, f"{label}: tensor {i} is off by {error}"


# ----------------------------------------------------------------------------------------- equality


@functools.cache
def reference_results(option, *case):
    inputs, hiding = make_inputs(*case)
    tensors = named_tensors(make_layer(**OPTIONS[option]))
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    y = reference(tensors, *inputs, **hiding, **OPTIONS[option])
    return [y.detach(), *gradients(y, [*inputs, *tensors.values()])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_equals_reference(layout):
    """With every kernel, in outputs and all gradients: self- and cross-attention, every mask."""
    for option, *case in CASES:
        layer = make_layer(layout, **OPTIONS[option])
        for layer.kernel in KERNELS:
            inputs, hiding = make_inputs(*case)
            layer.zero_grad()
            y = layer(*inputs, **hiding)
            found = [y, *gradients(y, inputs)]
            found += named_tensors(layer, {p: p.grad for p in layer.parameters()}).values()
            label = f"{layer.kernel}, {option}, {case}"
            assert_near(found, reference_results(option, *case), TOLERANCE, label)


def test_reference_equals_torch():
    """torch.nn.MultiheadAttention, in which True hides a key."""
    tensors = named_tensors(make_layer(bias=True))
    theirs = torch.nn.MultiheadAttention(C, H, batch_first=True)
    parts = (tensors["qkv"].flatten(0, 2), tensors["qkv.bias"].flatten())
    parts += (tensors["out_proj"], tensors["out_proj.bias"])
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    theirs.load_state_dict(dict(zip(names, parts, strict=True)))
    (x, keys, values), _ = make_inputs(contexts=2)
    expected = [theirs(x, keys, values)[0]]
    assert_near([reference(tensors, x, keys, values)], expected, TOLERANCE)
    future = torch.ones(T, T).triu(1) == 1
    expected = [theirs(x, x, x, attn_mask=future)[0]]
    assert_near([reference(tensors, x, causal=True)], expected, TOLERANCE)


@every_pair
def test_attention_in_bfloat16(layout, kernel):
    layer, x, mask = make_layer(layout, kernel, **OPTIONS[2]), randn(B, T, C), make_mask(T, T)
    expected = layer(x, mask=mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer.float()(x.float(), mask=mask)
    assert y.dtype == torch.bfloat16
    assert_near([y], [expected], 0.05)


@every_pair
def test_cache_equals_one_pass(layout, kernel):
    """Chunks of a text, causal or with a mask."""
    for options, mask in itertools.product(OPTIONS, (None, make_mask(1, H, 9, 9).tril())):
        layer, x, cache = make_layer(layout, kernel, **options), randn(B, 9, C), LayerCache(9)
        outputs = []
        for chunk in x.split([4, 1, 3, 1], dim=1):
            start, end = cache.length, cache.length + chunk.size(1)
            chunk_mask = None if mask is None else mask[..., start:end, :end]
            outputs.append(layer(chunk, causal=mask is None, mask=chunk_mask, cache=cache))
        expected = layer(x, causal=mask is None, mask=mask)
        assert_near([torch.cat(outputs, dim=1)], [expected], TOLERANCE)


# ------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_of_attention_weights(kernel):
    """Each with the given probability; the others are scaled up."""
    equal, one_hot = torch.zeros(50, 4, 10, 1), torch.eye(10).expand(50, 4, 10, 10)
    torch.manual_seed(0)
    weights = KERNELS[kernel](equal, equal, one_hot, None, False, 0.3)  # (B, H, T, S)
    kept = weights != 0
    assert torch.allclose(weights[kept], torch.tensor(0.1 / 0.7))
    for part in (kept, kept[:, 0], kept[:25], kept[:, :, 0], kept[..., 0]):
        assert abs(part.double().mean() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / part.numel())


def test_dropout_of_the_output():
    """Beside that of the weights; both are off in evaluation."""
    x, plain = randn(B, T, C), make_layer()(randn(B, T, C))
    torch.manual_seed(0)
    y = make_layer(dropout=0.5)(x)
    assert 0 < (y != 0).sum() < y.numel()
    assert_near([y[y != 0]], [2 * plain[y != 0]], TOLERANCE)
    assert not torch.equal(make_layer(attention_dropout=0.5)(x), plain)
    assert torch.equal(make_layer(dropout=0.5, attention_dropout=0.5).eval()(x), plain)


def test_layouts_and_kernels_of_settings():
    assert tuple(LAYOUTS) == schema.LAYOUTS and tuple(KERNELS) == schema.KERNELS
