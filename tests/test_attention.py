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
from model.kv_cache import KVCache
from model.parameters import all_head_weights
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


def boolean_mask(*shape, seed=0):
    """Build a boolean mask that hides two in five keys, and every key from query 2."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., 2, :] = False
    return mask


def additive_mask(*shape):
    """Build an additive mask: a random number where `boolean_mask` is True, -inf elsewhere."""
    return randn(*shape).masked_fill(~boolean_mask(*shape), -math.inf)


OPTIONS = {  # arguments of MultiHeadAttention
    "plain": {},
    "wide": {"bias": True, "head_size": 5, "out_features": 7},
    "all": {"bias": True, "qk_norm": True, "rotary": True, "head_size": 4, "out_features": 1},
}
CONTEXT, VALUES = randn(B, S, C, seed=1), randn(B, S, C, seed=2)
INPUTS = {  # arguments of its forward, besides x
    "nothing": {},
    "context": {"context": CONTEXT},
    "context and value context": {"context": CONTEXT, "value_context": VALUES},
    "value context": {"value_context": randn(B, T, C, seed=2)},
    "boolean (T, S)": {"mask": boolean_mask(T, T)},
    "boolean (B, T, S)": {"mask": boolean_mask(B, T, T)},
    "additive (1, H, T, S)": {"mask": additive_mask(1, H, T, T)},
    "all hidden": {"mask": torch.zeros(T, T, dtype=torch.bool)},
    "context and a mask": {"context": CONTEXT, "mask": additive_mask(B, H, T, S)},
}
CASES = [("plain", inputs) for inputs in INPUTS]
CASES += [
    ("wide", "nothing"), ("wide", "boolean (T, S)"),
    ("all", "nothing"), ("all", "context and a mask"),
]  # fmt: skip


def make_layer(layout="fused", kernel="sdpa", *, n_embd=C, n_head=H, rotary=False, **options):
    """Build a layer with large weights and biases, the same in every layout."""
    options["rotary"] = Rotary(options["head_size"], 16) if rotary else None
    layer = MultiHeadAttention(n_embd, n_head, layout=layout, kernel=kernel, **options)
    with torch.no_grad():
        for i, view in enumerate(weights_and_biases(layer)):
            view.copy_(0.5 * randn(*view.shape, seed=10 + i))
    return layer


def weights_and_biases(layer):
    """Return the layer's matrices and biases, in shapes and an order that no layout changes."""
    heads = [layer.projection.head_weights(h) for h in range(layer.projection.n_head)]
    return list(itertools.chain(*heads, layer.out_proj.parameters()))


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
    heads = all_head_weights(layer.projection, gradients)
    of_output = [gradients[parameter] for parameter in layer.out_proj.parameters()]
    return [*results[:n], *itertools.chain(*heads), *of_output]


@functools.cache
def reference_results(option, inputs):
    """Return what `layer_results` must return, computed by tests/reference.py."""
    layer = make_layer(**OPTIONS[option])
    leaves = [view.detach().clone().requires_grad_() for view in weights_and_biases(layer)]
    per_head = len(layer.projection.head_weights(0))
    attend = functools.partial(
        reference.attention,
        heads=[leaves[h * per_head : (h + 1) * per_head] for h in range(H)],
        output=leaves[H * per_head :],
        qk_norm=layer.qk_norm,
        rotary=layer.rotary is not None,
    )
    return output_and_gradients(attend, leaves, torch.float64, randn(B, T, C), **INPUTS[inputs])


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


@every_pair
def test_outputs_and_gradients_equal_the_reference(layout, kernel):
    for (option, input_name), (dtype, tolerance) in itertools.product(CASES, TOLERANCES.items()):
        layer = make_layer(layout, kernel, **OPTIONS[option])
        results = layer_results(layer, dtype, x=randn(B, T, C), **INPUTS[input_name])
        label = f"{option} layer given {input_name} in {dtype}"
        assert_near(results, reference_results(option, input_name), tolerance, label)


def test_after_manual_seed_a_bare_layer_has_the_same_weights_in_every_layout():
    layers = []
    for layout in LAYOUTS:
        torch.manual_seed(0)
        layers.append(weights_and_biases(MultiHeadAttention(C, H, layout=layout, bias=True)))
    for weights in layers:
        assert all(map(torch.equal, weights, layers[0]))
    assert layers[0][0].std() > 0 and not torch.equal(layers[0][0], layers[0][1])


@every_pair
@pytest.mark.parametrize("inputs", ["nothing", "context and value context"])
def test_outputs_equal_torch_nn_multihead_attention(layout, kernel, inputs):
    layer, x = make_layer(layout, kernel, bias=True), randn(B, T, C)
    heads = [layer.projection.head_weights(h) for h in range(H)]
    Wq, Wk, Wv, *biases = (torch.cat(part) for part in zip(*heads, strict=True))
    other = torch.nn.MultiheadAttention(C, H, batch_first=True)
    projection = {"in_proj_weight": torch.cat([Wq, Wk, Wv]), "in_proj_bias": torch.cat(biases)}
    output = {f"out_proj.{name}": tensor for name, tensor in layer.out_proj.named_parameters()}
    other.load_state_dict(projection | output)
    if inputs == "nothing":  # in torch's masks, True hides a key
        y, _ = other(x, x, x, attn_mask=torch.ones(T, T, dtype=torch.bool).triu(1))
    else:
        y, _ = other(x, CONTEXT, VALUES)
    assert_near([layer(x, **INPUTS[inputs])], [y], 1e-12)


sizes = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)
)
seeds = st.integers(0, 2**32 - 1)
MASK_SHAPES = ("none", "TS", "BTS", "1TS", "BHTS", "1HTS", "B1TS", "11TS")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(sizes, st.booleans(), st.sampled_from(MASK_SHAPES), st.booleans(), seeds)
def test_all_layouts_and_kernels_agree_for_any_shape_and_mask(
    sizes, cross_attention, shape, boolean, seed
):
    b, h, t, s, d = sizes
    s, mask = s if cross_attention else t, None
    if shape != "none":
        lengths = {"B": b, "H": h, "T": t, "S": s, "1": 1}
        mask = randn(*(lengths[letter] for letter in shape), seed=seed)
        mask = mask > 0 if boolean else mask.masked_fill(mask < 0, -math.inf)
    inputs = {"x": randn(b, t, C, seed=seed + 2), "mask": mask}
    if cross_attention:
        inputs["context"] = randn(b, s, C, seed=seed + 1)
    expected = None
    for pair in PAIRS:
        layer = make_layer(*pair, n_head=h, head_size=d, bias=True)
        results = layer_results(layer, torch.float64, **inputs)
        assert all(tensor.isfinite().all() for tensor in results)
        expected = expected or results
        assert_near(results, expected, 1e-12, pair)


@every_pair
def test_bfloat16_autocast_is_close_to_float64(layout, kernel):
    for option, inputs in (("all", "nothing"), ("wide", "boolean (T, S)")):
        layer = make_layer(layout, kernel, **OPTIONS[option]).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(randn(B, T, C).float(), **INPUTS[inputs])
        assert y.dtype == torch.bfloat16
        assert_near([y], [reference_results(option, inputs)[0]], 0.05, option)


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
    both = make_layer(dropout=0.5, attention_dropout=0.5).eval()
    assert torch.equal(both(x), plain(x))


# ----------------------------------------------------------------------------------------- KV cache


@every_pair
def test_chunks_through_the_kv_cache_give_the_output_of_one_forward_pass_with_any_mask(
    layout, kernel
):
    masks = (None, boolean_mask(9, 9), additive_mask(1, H, 9, 9))
    for option, mask in itertools.product(("plain", "all"), masks):
        layer, x = make_layer(layout, kernel, **OPTIONS[option]), randn(B, 9, C)
        cache, outputs = KVCache(9), []
        for chunk in x.split([4, 1, 3, 1], dim=1):
            start, end = cache.length, cache.length + chunk.size(1)
            chunk_mask = None if mask is None else mask[..., start:end, :end]
            outputs.append(layer(chunk, mask=chunk_mask, cache=cache))
        assert_near([torch.cat(outputs, dim=1)], [layer(x, mask=mask)], 1e-12, option)


def test_keys_that_do_not_fit_the_kv_cache_are_refused():
    cache, keys = KVCache(5), torch.zeros(2, 3, 3, 4)
    cache.append(keys, keys)
    with pytest.raises(ValueError, match="6 tokens exceed the cache's capacity of 5"):
        cache.append(keys, keys)
    with pytest.raises(ValueError, match=r"takes \(2, 3, 1, 4\)"):
        cache.append(torch.zeros(3, 3, 1, 4), torch.zeros(3, 3, 1, 4))


# ------------------------------------------------------------------------------------------- errors

X = (2, 4, 6)  # a valid shape
MISTAKES = {  # message: options of the layer; shapes of x and the contexts; options of forward
    "unknown layout 'fusd'; allowed: heads, separate, fused": ({"layout": "fusd"}, [X], {}),
    "n_embd 6 is not divisible by n_head 4": ({"n_head": 4}, [X], {}),
    r"\(2, 4, 5\).* allowed: x \(B, T, 6\)": ({}, [(2, 4, 5)], {}),
    r"mask is \(4, 5\) torch.bool; .* T 4, S 4": ({}, [X], {"mask": boolean_mask(4, 5)}),
    "a cache is for self-attention": ({}, [X, X], {"cache": KVCache(8)}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_invalid_arguments_raise_a_value_error_with_the_allowed_ones(message):
    options, shapes, arguments = MISTAKES[message]
    with pytest.raises(ValueError, match=message):
        make_layer(**options)(*(randn(*shape) for shape in shapes), **arguments)
