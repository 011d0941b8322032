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
from torch.nn import functional as F

from configs import schema
from configs.schema import ModelConfig
from model.attention import KERNELS, LAYOUTS, MultiHeadAttention, attention_weights, rms_norm
from model.gpt import GPT
from model.kv_cache import KVCache
from model.rotary import Rotary
from tests import reference

PAIRS = list(itertools.product(LAYOUTS, KERNELS))
every_pair = pytest.mark.parametrize(("layout", "kernel"), PAIRS)

B, T, S, C, H = 2, 4, 5, 6, 3
FUTURE = torch.ones(T, T, dtype=torch.bool).triu(1)  # True where the causal mask hides a key
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}  # largest error, relative to the norm


def identity(parameter):
    return parameter


def gradient(parameter):
    return parameter.grad


def randn(*shape, seed=0):
    """Draw from N(0, 1): float64 values that float32 represents exactly."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    ).double()


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
    "bias": {"bias": True},
    "qk_norm": {"qk_norm": True},
    "rotary": {"rotary": True},
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
    "boolean (B, 1, T, S)": {"mask": boolean_mask(B, 1, T, T)},
    "additive (T, S)": {"mask": additive_mask(T, T)},
    "additive (1, T, S)": {"mask": additive_mask(1, T, T)},
    "additive (1, H, T, S)": {"mask": additive_mask(1, H, T, T)},
    "additive (B, H, T, S)": {"mask": additive_mask(B, H, T, T)},
    "all hidden": {"mask": torch.zeros(T, T, dtype=torch.bool)},
    "contexts and a mask": {
        "context": CONTEXT,
        "value_context": VALUES,
        "mask": additive_mask(B, H, T, S),
    },
}
CASES = [(option, "nothing") for option in OPTIONS]
CASES += [("plain", inputs) for inputs in INPUTS] + [
    ("wide", "boolean (T, S)"),
    ("all", "contexts and a mask"),
]


def make_layer(layout="fused", kernel="sdpa", *, n_embd=C, n_head=H, rotary=False, **options):
    """Build a float64 layer with large weights and biases, the same in every layout."""
    torch.set_default_dtype(torch.float64)  # for the rotary angles
    rotary_module = Rotary(options.get("head_size") or n_embd // n_head, 16) if rotary else None
    torch.set_default_dtype(torch.float32)
    layer = MultiHeadAttention(
        n_embd, n_head, layout=layout, kernel=kernel, rotary=rotary_module, **options
    ).double()
    with torch.no_grad():
        for i, view in enumerate(weights_and_biases(layer)):
            view.copy_(0.5 * randn(*view.shape, seed=10 + i))
    return layer


def weights_and_biases(layer, tensor_of=identity):
    """Return the layer's matrices and biases, in shapes and an order that no layout changes."""
    heads = [layer.projection.head_weights(h, tensor_of) for h in range(layer.projection.n_head)]
    return list(itertools.chain(*heads, map(tensor_of, layer.out_proj.parameters())))


def outputs_and_gradients(layer, dtype, x, mask=None, **contexts):
    """Return the layer's output, then the gradients of a scalar function of it: with respect to
    `x` and the contexts, and to `weights_and_biases`.
    """
    layer = layer.to(dtype)
    inputs = {
        name: text.to(dtype, copy=True).requires_grad_()
        for name, text in {"x": x, **contexts}.items()
    }
    y = layer(**inputs, mask=mask)
    (y * randn(*y.shape, seed=9).to(dtype)).sum().backward()
    return [y.detach(), *map(gradient, inputs.values()), *weights_and_biases(layer, gradient)]


@functools.cache
def reference_results(option, input_name):
    """Return what `outputs_and_gradients` must return, computed by tests/reference.py."""
    mask = INPUTS[input_name].get("mask")
    inputs = {
        "x": randn(B, T, C),
        **{name: text for name, text in INPUTS[input_name].items() if name != "mask"},
    }
    layer = make_layer(**OPTIONS[option])
    inputs = {name: text.clone().requires_grad_() for name, text in inputs.items()}
    parameters = [view.detach().clone().requires_grad_() for view in weights_and_biases(layer)]
    per_head = len(layer.projection.head_weights(0))
    heads = [parameters[h * per_head : (h + 1) * per_head] for h in range(H)]
    context = inputs.get("context", inputs["x"])
    y = reference.attention(
        inputs["x"],
        context,
        inputs.get("value_context", context),
        heads,
        parameters[H * per_head :],
        mask=mask,
        causal=len(inputs) == 1,
        qk_norm=layer.qk_norm,
        rotary=layer.rotary is not None,
    )
    y = torch.stack(
        [torch.stack([torch.stack(list(map(torch.as_tensor, row))) for row in text]) for text in y]
    )
    (y * randn(*y.shape, seed=9)).sum().backward()
    leaves = [*inputs.values(), *parameters]
    return [
        y.detach(),
        *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves),
    ]


def assert_near(results, expected, tolerance, label=""):
    """Check that each tensor is within `tolerance` of the expected one, relative to the larger of
    1 and the expected tensor's norm.
    """
    for i, (actual, target) in enumerate(zip(results, expected, strict=True)):
        assert actual.shape == target.shape, f"{label}: tensor {i} has shape {tuple(actual.shape)}"
        error = (actual.double() - target.double()).norm().item() / max(
            1.0, target.double().norm().item()
        )
        assert error <= tolerance, f"{label}: tensor {i} is off by {error}"


# ------------------------------------------------------------------- equality with other attention


def test_the_settings_allow_exactly_the_layouts_and_kernels_of_the_tables():
    assert tuple(LAYOUTS) == schema.LAYOUTS
    assert tuple(KERNELS) == schema.KERNELS


@every_pair
def test_outputs_and_gradients_equal_the_reference(layout, kernel):
    for (option, input_name), (dtype, tolerance) in itertools.product(CASES, TOLERANCES.items()):
        layer = make_layer(layout, kernel, **OPTIONS[option])
        results = outputs_and_gradients(layer, dtype, randn(B, T, C), **INPUTS[input_name])
        assert_near(
            results,
            reference_results(option, input_name),
            tolerance,
            f"{option} layer given {input_name} in {dtype}",
        )


@every_pair
def test_outputs_and_gradients_equal_torch_nn_multihead_attention(layout, kernel):
    given_inputs = [INPUTS[name] for name in ("nothing", "context", "context and value context")]
    for contexts, bias, (dtype, tolerance) in itertools.product(
        given_inputs, (False, True), TOLERANCES.items()
    ):
        layer = make_layer(layout, kernel, bias=bias)
        results = outputs_and_gradients(layer, dtype, randn(B, T, C), **contexts)
        torch_attention = torch.nn.MultiheadAttention(
            C, H, bias=bias, batch_first=True, dtype=dtype
        )
        torch_attention.load_state_dict(torch_state(layer))
        inputs = [
            text.to(dtype, copy=True).requires_grad_()
            for text in (randn(B, T, C), *contexts.values())
        ]
        hidden = None if contexts else FUTURE  # in torch's masks, True hides a key
        y, _ = torch_attention(
            inputs[0],
            inputs[min(1, len(inputs) - 1)],
            inputs[-1],
            attn_mask=hidden,
            need_weights=False,
        )
        (y * randn(*y.shape, seed=9).to(dtype)).sum().backward()
        assert_near(results[: 1 + len(inputs)], [y.detach(), *map(gradient, inputs)], tolerance)
        gradients = torch_state(layer, gradient)
        for name, parameter in torch_attention.named_parameters():
            assert_near([gradients[name]], [parameter.grad], tolerance, name)


def torch_state(layer, tensor_of=identity):
    """Return the layer's parameters as a state_dict of torch.nn.MultiheadAttention."""
    heads = [layer.projection.head_weights(h, tensor_of) for h in range(H)]
    output = {
        f"out_proj.{name}": tensor_of(parameter)
        for name, parameter in layer.out_proj.named_parameters()
    }
    names = ("in_proj_weight", "in_proj_bias")[: len(output)]
    rows = [
        torch.cat([head[3 * i + part] for part in range(3) for head in heads])
        for i in range(len(names))
    ]
    return dict(zip(names, rows, strict=True)) | output


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_every_kernel_passes_gradcheck(kernel):
    q, k, v = (randn(2, 2, length, 3, seed=length).requires_grad_() for length in (3, 4, 5))
    mask = (
        additive_mask(1, 2, 3, 4)
        .nan_to_num(neginf=-1.0)
        .masked_fill(torch.eye(3, 4, dtype=torch.bool), -math.inf)
    )
    for given_mask, causal, keys in ((None, False, 4), (mask, False, 4), (None, True, 3)):
        inputs = (q, k[:, :, :keys], v[:, :, :keys])
        assert torch.autograd.gradcheck(
            lambda q, k, v, m=given_mask, c=causal: kernel(q, k, v, m, c, 0.0), inputs
        )


sizes = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)
)
seeds = st.integers(0, 2**32 - 1)
MASK_SHAPES = ("TS", "BTS", "1TS", "BHTS", "1HTS", "B1TS", "11TS")


@settings(max_examples=80, deadline=None, derandomize=True)
@given(sizes, st.sampled_from(["none", "causal", "one per text", "one per head"]), seeds)
def test_kernels_equal_einsum_attention_for_any_shape_and_mask(sizes, kind, seed):
    b, h, t, s, d = sizes
    s = t if kind == "causal" else s
    q, k, v = (randn(b, h, length, d, seed=seed + i) for i, length in enumerate((t, s, s)))
    mask = None
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(d)
    if kind == "causal":
        scores = scores + torch.full((t, t), -math.inf, dtype=torch.float64).triu(1)
    elif kind != "none":
        mask = randn(b, h if kind == "one per head" else 1, t, s, seed=seed + 3)
        # every query may attend to key 0
        mask[..., 1:] = mask[..., 1:].masked_fill(mask[..., 1:] < 0, -math.inf)
        scores = scores + mask
    expected = torch.einsum("bhts,bhsd->bhtd", scores.exp() / scores.exp().sum(-1, keepdim=True), v)
    for kernel, (dtype, tolerance) in itertools.product(
        KERNELS.values(), {**TOLERANCES, torch.bfloat16: 0.05}.items()
    ):
        inputs = [None if tensor is None else tensor.to(dtype) for tensor in (q, k, v, mask)]
        result = kernel(*inputs, kind == "causal", 0.0)
        assert result.dtype == dtype
        assert_near([result], [expected], tolerance)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(sizes, st.booleans(), st.sampled_from(MASK_SHAPES), st.booleans(), seeds)
def test_all_layouts_and_kernels_agree_for_any_shape_and_mask(
    sizes, cross_attention, shape, boolean, seed
):
    b, h, t, s, d = sizes
    s = s if cross_attention else t
    mask = randn(
        *(dict(zip("BHTS1", (b, h, t, s, 1), strict=True))[letter] for letter in shape), seed=seed
    )
    mask = mask > 0 if boolean else mask.masked_fill(mask < 0, -math.inf)
    context = {"context": randn(b, s, C, seed=seed + 1)} if cross_attention else {}
    results = {}
    for pair in PAIRS:
        layer = make_layer(*pair, n_head=h, head_size=d, bias=True)
        results[pair] = outputs_and_gradients(
            layer, torch.float64, randn(b, t, C, seed=seed + 2), mask, **context
        )
        assert all(tensor.isfinite().all() for tensor in results[pair])
        assert_near(results[pair], results[PAIRS[0]], 1e-12, pair)


@every_pair
def test_attention_maps_computed_from_queries_and_keys_give_the_layers_output(layout, kernel):
    layer, x = make_layer(layout, kernel, **OPTIONS["all"]), randn(B, T, C)
    q, k, v = layer.queries_keys_values(x)
    maps = attention_weights(q, k, causal=True)
    assert maps.shape == (B, H, T, T) and not maps.triu(1).any()
    assert_near([maps.sum(-1)], [torch.ones(B, H, T)], 1e-12)
    heads = torch.einsum("bhts,bhsd->bthd", maps, v)
    assert_near([layer.out_proj(heads.flatten(2))], [layer(x)], 1e-12)


@every_pair
def test_bfloat16_autocast_is_close_to_float64(layout, kernel):
    for option, input_name in CASES:
        float64_output = reference_results(option, input_name)[0]
        layer = make_layer(layout, kernel, **OPTIONS[option]).float()
        given_inputs = {
            name: t if t.dtype == torch.bool else t.float()
            for name, t in INPUTS[input_name].items()
        }
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(randn(B, T, C).float(), **given_inputs)
        assert y.dtype == torch.bfloat16
        assert_near([y], [float64_output], 0.05, f"{option} layer given {input_name}")
        y.float().square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


# -------------------------------------------------------------------------------- causality, masks


@every_pair
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_future_tokens_have_exactly_no_influence(layout, kernel, positions):
    size = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8}
    model = GPT(ModelConfig(attention=layout, kernel=kernel, positions=positions, **size), 11)
    embedded = []
    model.token_embedding.register_forward_hook(
        lambda module, inputs, output: embedded.append(output)
    )
    ids = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    logits = model(ids)
    for t in range(8):
        edited = ids.clone()
        edited[:, t + 1 :] = (edited[:, t + 1 :] + 1 + t) % 11
        assert torch.equal(model(edited)[:, : t + 1], logits[:, : t + 1])
        (grad,) = torch.autograd.grad(logits[:, t].square().sum(), embedded[0], retain_graph=True)
        assert grad[:, t + 1 :].eq(0).all() and grad[:, : t + 1].ne(0).any(-1).all()


@every_pair
def test_a_fully_masked_query_gives_zeros_and_passes_no_gradient(layout, kernel):
    some_queries = torch.zeros(B, H, T, T, dtype=torch.bool)  # True: hidden
    some_queries[1, 2, 3] = some_queries[0, :, 0] = True
    past = torch.ones(T, T, dtype=torch.bool).tril()  # the causal mask hides the rest
    for hidden in (some_queries, past):
        fully_masked = (hidden | FUTURE).all(-1).expand(B, H, T)
        for mask in (~hidden, torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)):
            layer, x = make_layer(layout, kernel, bias=True), randn(B, T, C).requires_grad_()
            concatenated = []
            layer.out_proj.register_forward_pre_hook(
                lambda module, inputs, c=concatenated: c.append(inputs[0])
            )
            y = layer(x, mask=mask)
            heads = concatenated[0].unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, D)
            assert heads[fully_masked].eq(0).all() and heads[~fully_masked].ne(0).all()
            sources = [x, *layer.projection.parameters()]
            for grad in torch.autograd.grad(heads[fully_masked].sum(), sources, retain_graph=True):
                assert grad.eq(0).all()
            for grad in torch.autograd.grad(y.sum(), sources):
                assert grad.isfinite().all()


@every_pair
def test_an_additive_mask_that_overflows_float16_hides_keys_as_minus_infinity_does(layout, kernel):
    layer, x = make_layer(layout, kernel).half(), randn(B, T, C).half()
    mask = torch.zeros(T, T).masked_fill(~boolean_mask(T, T), -1e9)
    assert torch.equal(layer(x, mask=mask), layer(x, mask=boolean_mask(T, T)))


# ------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_drops_the_same_attention_weights_in_every_layout(kernel):
    results = []
    for layout in LAYOUTS:
        layer = make_layer(layout, kernel, bias=True, attention_dropout=0.5, dropout=0.2)
        torch.manual_seed(3)
        results.append(outputs_and_gradients(layer, torch.float64, randn(B, T, C)))
        assert_near(results[-1], results[0], 1e-12, layout)
    layer = make_layer("fused", kernel, bias=True)
    assert (results[0][0] - layer(randn(B, T, C))).norm() > 0.1  # dropout is on


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


@every_pair
def test_output_dropout_is_independent_of_attention_dropout_and_both_are_off_in_eval_mode(
    layout, kernel
):
    x, plain = randn(B, T, C), make_layer(layout, kernel)
    torch.manual_seed(0)
    y = make_layer(layout, kernel, dropout=0.5)(x)
    nonzero = y != 0
    assert 0 < nonzero.sum() < nonzero.numel()
    assert_near([y[nonzero]], [2 * plain(x)[nonzero]], 1e-12)
    both = make_layer(layout, kernel, dropout=0.5, attention_dropout=0.5).eval()
    assert torch.equal(both(x), plain(x))


# ----------------------------------------------------------------------------------------- KV cache


@every_pair
def test_chunks_through_the_kv_cache_give_the_output_of_one_forward_pass(layout, kernel):
    generator = torch.Generator().manual_seed(0)
    for options in OPTIONS.values():
        layer, x = make_layer(layout, kernel, **options), randn(B, 9, C)
        whole = layer(x)
        for _ in range(4):
            assert_near([torch.cat(forward_in_chunks(layer, x, generator), dim=1)], [whole], 1e-12)


def forward_in_chunks(layer, x, generator, mask=None):
    """Return the outputs for x in chunks of random lengths, with a KV cache."""
    cache, outputs = KVCache(x.size(1)), []
    while (start := cache.length) < x.size(1):
        end = start + int(torch.randint(1, x.size(1) - start + 1, (), generator=generator))
        chunk_mask = None if mask is None else mask[..., start:end, :end]
        outputs.append(layer(x[:, start:end], mask=chunk_mask, cache=cache))
    return outputs


@every_pair
def test_a_mask_applies_to_cached_keys_too(layout, kernel):
    generator = torch.Generator().manual_seed(0)
    layer, x = make_layer(layout, kernel, **OPTIONS["all"]), randn(B, 9, C)
    for mask in (boolean_mask(9, 9), additive_mask(B, 9, 9), additive_mask(1, H, 9, 9)):
        for _ in range(3):
            assert_near(
                [torch.cat(forward_in_chunks(layer, x, generator, mask), dim=1)],
                [layer(x, mask=mask)],
                1e-12,
            )


# ------------------------------------------------------------------------------------------- errors

MISTAKES = {
    "unknown layout 'fusd'; allowed: heads, separate, fused": lambda: MultiHeadAttention(
        6, 3, layout="fusd"
    ),
    "unknown kernel 'flash'; allowed: loop, bmm, batched, sdpa": lambda: MultiHeadAttention(
        6, 3, kernel="flash"
    ),
    "n_embd 6 is not divisible by n_head 4": lambda: MultiHeadAttention(6, 4),
    "head size 3 is odd": lambda: Rotary(3, 8),
    r"\(2, 4, 5\).* allowed: x \(B, T, 6\)": lambda: make_layer()(randn(2, 4, 5)),
    r"\(4, 6\).* allowed: x \(B, T, 6\)": lambda: make_layer()(randn(4, 6)),
    r"\(3, 5, 6\).* contexts \(B, S, 6\)": lambda: make_layer()(randn(2, 4, 6), randn(3, 5, 6)),
    r"\(2, 5, 1, 6\).* contexts": lambda: make_layer()(randn(2, 4, 6), randn(2, 5, 1, 6)),
    r"\(2, 4, 6\)\]; allowed: .* contexts": lambda: make_layer()(
        randn(2, 4, 6), randn(2, 5, 6), randn(2, 4, 6)
    ),
    r"mask is \(4, 5\) torch.bool; allowed: .* T 4, S 4": lambda: make_layer()(
        randn(2, 4, 6), mask=boolean_mask(4, 5)
    ),
    r"mask is \(3, 4, 4\)": lambda: make_layer()(randn(2, 4, 6), mask=boolean_mask(3, 4, 4)),
    r"mask is \(2, 2, 4, 4\) .* H 3 or 1": lambda: make_layer()(
        randn(2, 4, 6), mask=boolean_mask(2, 2, 4, 4)
    ),
    r"mask is \(1, 2, 3, 4, 4\)": lambda: make_layer()(
        randn(2, 4, 6), mask=boolean_mask(1, 2, 3, 4, 4)
    ),
    "mask is .* torch.int64; allowed: boolean": lambda: make_layer()(
        randn(2, 4, 6), mask=boolean_mask(4, 4).long()
    ),
    "a cache is for self-attention": lambda: make_layer()(
        randn(2, 4, 6), randn(2, 4, 6), cache=KVCache(8)
    ),
    "position 16 is out of range; allowed: 0 to 15": lambda: make_layer(rotary=True)(
        randn(1, 17, 6)
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_invalid_arguments_raise_a_value_error_with_the_allowed_ones(message):
    with pytest.raises(ValueError, match=message):
        MISTAKES[message]()


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_rms_norm_equals_torchs_rms_norm_without_weights(dtype):
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = F.rms_norm(
        x.double(), (8,), eps=torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        normalized = rms_norm(x)
    assert normalized.dtype == dtype
    torch.testing.assert_close(
        normalized.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0
    )


def test_qk_norm_in_float16_neither_overflows_nor_underflows():
    x = torch.cat([torch.full((1, 4), size) for size in (65504.0, 300.0, 1.0, 6e-5, 6e-8)]).half()
    expected = F.rms_norm(x.float(), (4,), eps=torch.finfo(torch.float32).eps)
    torch.testing.assert_close(rms_norm(x).float(), expected, rtol=1e-3, atol=0)
    assert rms_norm(torch.full((1, 4), 300.0).half()).tolist() == [[1.0] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_in_the_other_dtypes_is_computed_as_before(dtype):
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    mean_square = (x * x).mean(dim=-1, keepdim=True, dtype=torch.float32)
    eps = torch.finfo(torch.float32).eps
    assert torch.equal(rms_norm(x), x * (mean_square + eps).rsqrt().to(dtype))
