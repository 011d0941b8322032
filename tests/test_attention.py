"""Equality of all layouts and kernels: the same causal, masked or cross-attention.

All tests loop over LAYOUTS and KERNELS, so a new row of either table is tested at once.

B batch, T queries, S keys, C n_embd, H n_head, D head size
"""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import schema
from model.attention import KERNELS, LAYOUTS, MultiHeadAttention
from model.kv_cache import LayerCache
from model.parameters import load_tensors, named_tensors
from model.rotary import Rotary
from tests import reference

PAIRS = list(itertools.product(LAYOUTS, KERNELS))
every_pair = pytest.mark.parametrize(("layout", "kernel"), PAIRS)

B, T, S, C, H = 2, 4, 5, 6, 3
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}  # largest error, relative to the norm


@pytest.fixture(autouse=True, scope="module")
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def randn(*shape, seed=0):
    """Draw from N(0, 1): float64 values that float32 represents exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).double()


def boolean_mask(*shape):
    """Build a boolean mask that hides two in five keys, and every key from the last query."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[..., -1, :] = False
    return mask


def additive_mask(*shape):
    """Build an additive mask: a random number where `boolean_mask` is True, -inf elsewhere."""
    return randn(*shape).masked_fill(~boolean_mask(*shape), -math.inf)


OPTIONS = {  # arguments of MultiHeadAttention
    "plain": {},
    "wide": {"bias": True, "head_size": 5, "out_features": 7},
    "bare": {"qk_norm": True, "rotary": True, "head_size": 4, "out_features": 7},
    "all": {"bias": True, "qk_norm": True, "rotary": True, "head_size": 4, "out_features": 1},
}
CONTEXTS = ((), ("context",), ("context", "value_context"), ("value_context",))
MASKS = ("none", "boolean TS", "boolean BTS", "additive BHTS", "additive 1HTS")
LENGTHS = ((T, S), (1, 3), (3, 1), (2, 2))  # t, s
CASES = list(itertools.product(OPTIONS, CONTEXTS, MASKS, LENGTHS))


def make_inputs(contexts=(), mask="none", lengths=(T, S)):
    """Build arguments of its forward, by the names of the contexts and the kind of the mask."""
    t, s = lengths if "context" in contexts else (lengths[0], lengths[0])
    inputs = {"x": randn(B, t, C)}
    inputs |= {name: randn(B, s, C, seed=seed) for seed, name in enumerate(contexts, 1)}
    if mask != "none":
        kind, letters = mask.split()
        sizes = {"1": 1, "B": B, "H": H, "T": t, "S": s}
        build = boolean_mask if kind == "boolean" else additive_mask
        inputs["mask"] = build(*(sizes[letter] for letter in letters))
    return inputs


def make_layer(layout="fused", kernel="sdpa", *, rotary=False, **options):
    """Build a layer with large weights and biases, the same in every layout."""
    options["rotary"] = Rotary(options["head_size"], 16) if rotary else None
    layer = MultiHeadAttention(C, H, layout=layout, kernel=kernel, **options)
    with torch.no_grad():
        tensors = named_tensors(Holder(layer))
        for i, tensor in enumerate(tensors.values()):
            tensor.copy_(0.5 * randn(*tensor.shape, seed=10 + i))
        load_tensors(Holder(layer), tensors)
    return layer


class Holder(torch.nn.Module):
    """A module with an attention layer, as a block is."""

    def __init__(self, layer):
        super().__init__()
        self.attention = layer


def output_and_gradients(attend, leaves, dtype, x, mask=None, **contexts):
    """Return the output, then the gradients of a scalar function of it: with respect to `x` and
    the contexts, and to the leaves.
    """
    inputs = {
        name: text.to(dtype, copy=True).requires_grad_()
        for name, text in {"x": x, **contexts}.items()
    }
    y = attend(**inputs, mask=mask)
    total = (y * randn(*y.shape, seed=9).to(dtype)).sum()
    leaves = [*inputs.values(), *leaves]
    return [y.detach(), *torch.autograd.grad(total, leaves, materialize_grads=True)]


def layer_results(layer, dtype, **inputs):
    """Return the `output_and_gradients` of a layer; the last ones are of `weights_and_biases`."""
    parameters = list(layer.to(dtype).parameters())
    results = output_and_gradients(layer, parameters, dtype, **inputs)
    n = len(results) - len(parameters)
    gradients = dict(zip(parameters, results[n:], strict=True))
    return [*results[:n], *named_tensors(Holder(layer), gradients.get).values()]


@functools.cache
def reference_results(option, *case):
    """Return what `layer_results` must return, computed by tests/reference.py."""
    layer = make_layer(**OPTIONS[option])
    leaves = [tensor.requires_grad_() for tensor in named_tensors(Holder(layer)).values()]
    count = len(layer.projection.shapes)  # the weight (3, H, D, C), and the bias (3, H, D)
    attend = functools.partial(
        reference.attention,
        heads=[[part for qkv in leaves[:count] for part in qkv[:, h]] for h in range(H)],
        output=leaves[count:],
        qk_norm=layer.qk_norm,
        rotary=layer.rotary is not None,
    )
    return output_and_gradients(attend, leaves, torch.float64, **make_inputs(*case))


def assert_near(results, expected, tolerance, label=""):
    """Check that each tensor is within `tolerance` of the expected one, relative to the larger of
    1 and the expected tensor's norm.
    """
    for i, (actual, target) in enumerate(zip(results, expected, strict=True)):
        assert actual.shape == target.shape, f"{label}: tensor {i} has shape {tuple(actual.shape)}"
        norm = max(1.0, target.double().norm().item())
        error = (actual.double() - target.double()).norm().item() / norm
        assert error <= tolerance, f"{label}: tensor {i} is off by {error}"


# ------------------------------------------------------------------- equality with other attention


def test_the_settings_allow_exactly_the_layouts_and_kernels_of_the_tables():
    assert tuple(LAYOUTS) == schema.LAYOUTS
    assert tuple(KERNELS) == schema.KERNELS


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from(CASES))
def test_every_layout_and_kernel_equals_the_reference_in_outputs_and_gradients(layout, case):
    option, *inputs = case
    for dtype, tolerance in TOLERANCES.items():
        layer = make_layer(layout, **OPTIONS[option])
        for name, layer.kernel in KERNELS.items():
            results = layer_results(layer, dtype, **make_inputs(*inputs))
            assert_near(results, reference_results(*case), tolerance, f"{name} in {dtype}")


@every_pair
def test_outputs_equal_torch_nn_multihead_attention(layout, kernel):
    layer = make_layer(layout, kernel, bias=True)
    qkv, bias = (
        each.flatten(0, 2)
        for each in itertools.islice(
            named_tensors(Holder(layer)).values(), len(layer.projection.shapes)
        )
    )
    other = torch.nn.MultiheadAttention(C, H, batch_first=True)
    projection = {"in_proj_weight": qkv, "in_proj_bias": bias}
    output = {"out_proj.bias": torch.zeros(C)}
    output |= {f"out_proj.{name}": tensor for name, tensor in layer.out_proj.named_parameters()}
    other.load_state_dict(projection | output)
    x, context, values = inputs = make_inputs(("context", "value_context")).values()
    assert_near([layer(*inputs)], [other(x, context, values)[0]], 1e-12)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)  # in torch's masks, True hides a key
    assert_near([layer(x)], [other(x, x, x, attn_mask=future)[0]], 1e-12)


@every_pair
@pytest.mark.parametrize("mask", ["none", "boolean TS"])
def test_bfloat16_autocast_is_close_to_float64(layout, kernel, mask):
    layer, inputs = make_layer(layout, kernel, **OPTIONS["all"]).float(), make_inputs((), mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(inputs["x"].float(), mask=inputs.get("mask"))
    assert y.dtype == torch.bfloat16
    assert_near([y], [reference_results("all", (), mask)[0]], 0.05)


# ------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_attention_weights_are_dropped_with_the_given_probability_and_the_rest_scaled_up(kernel):
    b, h, t = 50, 4, 10
    equal, one_hot = torch.zeros(b, h, t, 1), torch.eye(t).expand(b, h, t, t)
    torch.manual_seed(0)
    weights = kernel(equal, equal, one_hot, None, False, 0.3)  # (b, h, t, t)
    nonzero = weights != 0
    assert torch.allclose(weights[nonzero], torch.tensor(1 / t / 0.7))
    # all weights, one head, half the batch, one query, one key
    for subset in (nonzero, nonzero[:, 0], nonzero[:25], nonzero[:, :, 0], nonzero[..., 0]):
        assert abs(subset.float().mean() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / subset.numel())


def test_output_dropout_is_independent_of_attention_dropout_and_both_are_off_in_eval_mode():
    x, plain = randn(B, T, C), make_layer()
    torch.manual_seed(0)
    y = make_layer(dropout=0.5)(x)
    nonzero = y != 0
    assert 0 < nonzero.sum() < nonzero.numel()
    assert_near([y[nonzero]], [2 * plain(x)[nonzero]], 1e-12)
    assert not torch.equal(make_layer(attention_dropout=0.5)(x), plain(x))
    both = make_layer(dropout=0.5, attention_dropout=0.5).eval()
    assert torch.equal(both(x), plain(x))


# ----------------------------------------------------------------------------------------- KV cache


@every_pair
def test_chunks_through_the_kv_cache_give_the_output_of_one_forward_pass_with_any_mask(
    layout, kernel
):
    masks = (None, boolean_mask(9, 9), additive_mask(1, H, 9, 9))
    for options, mask in itertools.product(OPTIONS.values(), masks):
        layer, x = make_layer(layout, kernel, **options), randn(B, 9, C)
        cache, outputs = LayerCache(9), []
        for chunk in x.split([4, 1, 3, 1], dim=1):
            start, end = cache.length, cache.length + chunk.size(1)
            chunk_mask = None if mask is None else mask[..., start:end, :end]
            outputs.append(layer(chunk, mask=chunk_mask, cache=cache))
        assert_near([torch.cat(outputs, dim=1)], [layer(x, mask=mask)], 1e-12)


# ------------------------------------------------------------------------------------------- errors

X = randn(B, T, C)
MISTAKES = {  # message: arguments of the layer, or of its forward
    r"\(2, 4, 5\).* allowed: x \(B, T, 6\)": {"x": randn(2, 4, 5)},
    r"mask is \(4, 5\) torch.bool; .* T 4, S 4": {"x": X, "mask": boolean_mask(4, 5)},
    "a cache is for self-attention": {"x": X, "context": X, "cache": LayerCache(8)},
    "unknown layout 'fusd'; allowed: heads, separate, fused": {"layout": "fusd"},
    "unknown kernel 'flash'; allowed: loop, bmm, batched, sdpa, auto": {"kernel": "flash"},
    "n_embd 6 is not divisible by n_head 4": {"n_head": 4},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_raises_a_value_error_that_names_what_is_allowed(message):
    arguments = MISTAKES[message]
    options = {} if "x" in arguments else arguments
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{"n_embd": C, "n_head": H} | options)(**arguments)
