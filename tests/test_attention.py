"""Every layout with every kernel is the same function: multi-head attention, causal, masked or
crossed.

All tests loop over the two tables, so that a new row is tested before anybody writes a test for it.

B texts, T queries, S keys, C n_embd, H n_head, D head size
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
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)  # what causality hides
PRECISIONS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
}  # how far off a result may be, relative to its norm


def itself(parameter):
    return parameter


def gradient(parameter):
    return parameter.grad


def numbers(*shape, seed=0):
    """From N(0, 1) in float64, with no more digits than float32 has."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    ).double()


def allowed(*shape, seed=0):
    """A boolean mask that hides two in five keys, and from query 2 all of them."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., 2, :] = False
    return mask


def added(*shape):
    """The additive mask that goes with it: some number where `allowed` is True, -inf elsewhere."""
    return numbers(*shape).masked_fill(~allowed(*shape), -math.inf)


OPTIONS = {  # what a layer is
    "plain": {},
    "bias": {"bias": True},
    "qk_norm": {"qk_norm": True},
    "rotary": {"rotary": True},
    "wide": {"bias": True, "head_size": 5, "out_features": 7},
    "all": {"bias": True, "qk_norm": True, "rotary": True, "head_size": 4, "out_features": 1},
}
CONTEXT, VALUES = numbers(B, S, C, seed=1), numbers(B, S, C, seed=2)
INPUTS = {  # and what it is given, besides x
    "nothing": {},
    "context": {"context": CONTEXT},
    "context and value context": {"context": CONTEXT, "value_context": VALUES},
    "value context": {"value_context": numbers(B, T, C, seed=2)},
    "boolean (T, S)": {"mask": allowed(T, T)},
    "boolean (B, T, S)": {"mask": allowed(B, T, T)},
    "boolean (B, 1, T, S)": {"mask": allowed(B, 1, T, T)},
    "additive (T, S)": {"mask": added(T, T)},
    "additive (1, T, S)": {"mask": added(1, T, T)},
    "additive (1, H, T, S)": {"mask": added(1, H, T, T)},
    "additive (B, H, T, S)": {"mask": added(B, H, T, T)},
    "all hidden": {"mask": torch.zeros(T, T, dtype=torch.bool)},
    "contexts and a mask": {"context": CONTEXT, "value_context": VALUES, "mask": added(B, H, T, S)},
}
CASES = [(option, "nothing") for option in OPTIONS]
CASES += [("plain", inputs) for inputs in INPUTS] + [
    ("wide", "boolean (T, S)"),
    ("all", "contexts and a mask"),
]


def layer(layout="fused", kernel="sdpa", *, n_embd=C, n_head=H, rotary=False, **options):
    """A layer in float64 with large matrices and biases, the same in every layout."""
    torch.set_default_dtype(torch.float64)  # for the angles of the rotation
    turning = Rotary(options.get("head_size") or n_embd // n_head, 16) if rotary else None
    torch.set_default_dtype(torch.float32)
    made = MultiHeadAttention(
        n_embd, n_head, layout=layout, kernel=kernel, rotary=turning, **options
    ).double()
    with torch.no_grad():
        for i, view in enumerate(views(made)):
            view.copy_(0.5 * numbers(*view.shape, seed=10 + i))
    return made


def views(made, of=itself):
    """The layer's matrices and biases, in shapes and an order that are the same in every layout."""
    heads = [made.projection.head_weights(h, of) for h in range(made.projection.n_head)]
    return list(itertools.chain(*heads, map(of, made.out_proj.parameters())))


def outputs_and_gradients(made, dtype, x, mask=None, **contexts):
    """What the layer makes of its inputs; what a function of that has for gradients to the texts,
    and to `views`.
    """
    made = made.to(dtype)
    texts = {
        name: text.to(dtype, copy=True).requires_grad_()
        for name, text in {"x": x, **contexts}.items()
    }
    y = made(**texts, mask=mask)
    (y * numbers(*y.shape, seed=9).to(dtype)).sum().backward()
    return [y.detach(), *map(gradient, texts.values()), *views(made, gradient)]


@functools.cache
def expected(option, inputs):
    """The same of the reference."""
    mask = INPUTS[inputs].get("mask")
    texts = {
        "x": numbers(B, T, C),
        **{name: text for name, text in INPUTS[inputs].items() if name != "mask"},
    }
    made = layer(**OPTIONS[option])
    texts = {name: text.clone().requires_grad_() for name, text in texts.items()}
    parameters = [view.detach().clone().requires_grad_() for view in views(made)]
    per_head = len(made.projection.head_weights(0))
    heads = [parameters[h * per_head : (h + 1) * per_head] for h in range(H)]
    context = texts.get("context", texts["x"])
    y = reference.attention(
        texts["x"],
        context,
        texts.get("value_context", context),
        heads,
        parameters[H * per_head :],
        mask=mask,
        causal=len(texts) == 1,
        qk_norm=made.qk_norm,
        rotary=made.rotary is not None,
    )
    y = torch.stack(
        [torch.stack([torch.stack(list(map(torch.as_tensor, row))) for row in text]) for text in y]
    )
    (y * numbers(*y.shape, seed=9)).sum().backward()
    leaves = [*texts.values(), *parameters]
    return [
        y.detach(),
        *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves),
    ]


def assert_near(ours, theirs, tolerance, what=""):
    """Each tensor is within `tolerance` of its counterpart, relative to the larger of 1 and the
    counterpart's norm.
    """
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our.shape == their.shape, f"{what}: tensor {i} has shape {tuple(our.shape)}"
        off = (our.double() - their.double()).norm().item() / max(1.0, their.double().norm().item())
        assert off <= tolerance, f"{what}: tensor {i} is off by {off}"


# ------------------------------------------------------------------------------------- the function


def test_the_settings_name_every_layout_and_kernel():
    assert tuple(LAYOUTS) == schema.LAYOUTS
    assert tuple(KERNELS) == schema.KERNELS


@every_pair
def test_outputs_and_gradients_are_those_of_the_reference(layout, kernel):
    for (option, inputs), (dtype, tolerance) in itertools.product(CASES, PRECISIONS.items()):
        made = layer(layout, kernel, **OPTIONS[option])
        ours = outputs_and_gradients(made, dtype, numbers(B, T, C), **INPUTS[inputs])
        assert_near(
            ours, expected(option, inputs), tolerance, f"{option} layer given {inputs} in {dtype}"
        )


@every_pair
def test_outputs_and_gradients_are_those_of_torchs_multihead_attention(layout, kernel):
    given_inputs = [INPUTS[name] for name in ("nothing", "context", "context and value context")]
    for contexts, bias, (dtype, tolerance) in itertools.product(
        given_inputs, (False, True), PRECISIONS.items()
    ):
        made = layer(layout, kernel, bias=bias)
        ours = outputs_and_gradients(made, dtype, numbers(B, T, C), **contexts)
        theirs = torch.nn.MultiheadAttention(C, H, bias=bias, batch_first=True, dtype=dtype)
        theirs.load_state_dict(packed(made))
        texts = [
            text.to(dtype, copy=True).requires_grad_()
            for text in (numbers(B, T, C), *contexts.values())
        ]
        hidden = None if contexts else LATER  # the booleans of their mask mean the opposite of ours
        y, _ = theirs(
            texts[0], texts[min(1, len(texts) - 1)], texts[-1], attn_mask=hidden, need_weights=False
        )
        (y * numbers(*y.shape, seed=9).to(dtype)).sum().backward()
        assert_near(ours[: 1 + len(texts)], [y.detach(), *map(gradient, texts)], tolerance)
        gradients = packed(made, gradient)
        for name, parameter in theirs.named_parameters():
            assert_near([gradients[name]], [parameter.grad], tolerance, name)


def packed(made, of=itself):
    """The layer's parameters under the names and in the shapes of torch.nn.MultiheadAttention."""
    heads = [made.projection.head_weights(h, of) for h in range(H)]
    output = {
        f"out_proj.{name}": of(parameter) for name, parameter in made.out_proj.named_parameters()
    }
    names = ("in_proj_weight", "in_proj_bias")[: len(output)]
    rows = [
        torch.cat([head[3 * i + part] for part in range(3) for head in heads])
        for i in range(len(names))
    ]
    return dict(zip(names, rows, strict=True)) | output


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_gradcheck_passes(kernel):
    q, k, v = (numbers(2, 2, length, 3, seed=length).requires_grad_() for length in (3, 4, 5))
    mask = (
        added(1, 2, 3, 4)
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
def test_kernels_agree_with_sums_over_indices_for_any_shape_and_mask(sizes, kind, seed):
    b, h, t, s, d = sizes
    s = t if kind == "causal" else s
    q, k, v = (numbers(b, h, length, d, seed=seed + i) for i, length in enumerate((t, s, s)))
    mask = None
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(d)
    if kind == "causal":
        scores = scores + torch.full((t, t), -math.inf, dtype=torch.float64).triu(1)
    elif kind != "none":
        mask = numbers(b, h if kind == "one per head" else 1, t, s, seed=seed + 3)
        mask[..., 1:] = mask[..., 1:].masked_fill(
            mask[..., 1:] < 0, -math.inf
        )  # each query may see key 0
        scores = scores + mask
    expected = torch.einsum("bhts,bhsd->bhtd", scores.exp() / scores.exp().sum(-1, keepdim=True), v)
    for kernel, (dtype, tolerance) in itertools.product(
        KERNELS.values(), {**PRECISIONS, torch.bfloat16: 0.05}.items()
    ):
        inputs = [None if tensor is None else tensor.to(dtype) for tensor in (q, k, v, mask)]
        ours = kernel(*inputs, kind == "causal", 0.0)
        assert ours.dtype == dtype
        assert_near([ours], [expected], tolerance)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(sizes, st.booleans(), st.sampled_from(MASK_SHAPES), st.booleans(), seeds)
def test_pairs_agree_for_any_shape_and_mask(sizes, crossed, shape, boolean, seed):
    b, h, t, s, d = sizes
    s = s if crossed else t
    mask = numbers(
        *(dict(zip("BHTS1", (b, h, t, s, 1), strict=True))[letter] for letter in shape), seed=seed
    )
    mask = mask > 0 if boolean else mask.masked_fill(mask < 0, -math.inf)
    context = {"context": numbers(b, s, C, seed=seed + 1)} if crossed else {}
    results = {}
    for pair in PAIRS:
        made = layer(*pair, n_head=h, head_size=d, bias=True)
        results[pair] = outputs_and_gradients(
            made, torch.float64, numbers(b, t, C, seed=seed + 2), mask, **context
        )
        assert all(tensor.isfinite().all() for tensor in results[pair])
        assert_near(results[pair], results[PAIRS[0]], 1e-12, pair)


@every_pair
def test_a_layers_queries_and_keys_give_its_attention_maps(layout, kernel):
    made, x = layer(layout, kernel, **OPTIONS["all"]), numbers(B, T, C)
    q, k, v = made.queries_keys_values(x)
    maps = attention_weights(q, k, causal=True)
    assert maps.shape == (B, H, T, T) and not maps.triu(1).any()
    assert_near([maps.sum(-1)], [torch.ones(B, H, T)], 1e-12)
    heads = torch.einsum("bhts,bhsd->bthd", maps, v)
    assert_near([made.out_proj(heads.flatten(2))], [made(x)], 1e-12)


@every_pair
def test_autocast_computes_in_bfloat16_what_float64_gives(layout, kernel):
    for option, inputs in CASES:
        exact = expected(option, inputs)[0]
        made = layer(layout, kernel, **OPTIONS[option]).float()
        given_inputs = {
            name: t if t.dtype == torch.bool else t.float() for name, t in INPUTS[inputs].items()
        }
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = made(numbers(B, T, C).float(), **given_inputs)
        assert y.dtype == torch.bfloat16
        assert_near([y], [exact], 0.05, f"{option} layer given {inputs}")
        y.float().square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


# --------------------------------------------------------------------------------- who may see whom


@every_pair
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_what_comes_later_has_exactly_no_influence(layout, kernel, positions):
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
        (slope,) = torch.autograd.grad(logits[:, t].square().sum(), embedded[0], retain_graph=True)
        assert slope[:, t + 1 :].eq(0).all() and slope[:, : t + 1].ne(0).any(-1).all()


@every_pair
def test_a_query_that_may_attend_to_nothing_gets_zeros_and_passes_no_gradient(layout, kernel):
    some = torch.zeros(B, H, T, T, dtype=torch.bool)  # what is hidden
    some[1, 2, 3] = some[0, :, 0] = True
    earlier = torch.ones(T, T, dtype=torch.bool).tril()  # and causality hides the rest
    for hidden in (some, earlier):
        blind = (hidden | LATER).all(-1).expand(B, H, T)
        for mask in (~hidden, torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)):
            made, x, concatenated = (
                layer(layout, kernel, bias=True),
                numbers(B, T, C).requires_grad_(),
                [],
            )
            made.out_proj.register_forward_pre_hook(
                lambda module, inputs, c=concatenated: c.append(inputs[0])
            )
            y = made(x, mask=mask)
            heads = concatenated[0].unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, D)
            assert heads[blind].eq(0).all() and heads[~blind].ne(0).all()
            sources = [x, *made.projection.parameters()]
            for slope in torch.autograd.grad(heads[blind].sum(), sources, retain_graph=True):
                assert slope.eq(0).all()
            for slope in torch.autograd.grad(y.sum(), sources):
                assert slope.isfinite().all()


@every_pair
def test_a_mask_too_large_for_float16_hides_as_minus_infinity_does(layout, kernel):
    made, x = layer(layout, kernel).half(), numbers(B, T, C).half()
    mask = torch.zeros(T, T).masked_fill(~allowed(T, T), -1e9)
    assert torch.equal(made(x, mask=mask), made(x, mask=allowed(T, T)))


# ------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_kernel_drops_the_same_weights_in_every_layout(kernel):
    results = []
    for layout in LAYOUTS:
        made = layer(layout, kernel, bias=True, attention_dropout=0.5, dropout=0.2)
        torch.manual_seed(3)
        results.append(outputs_and_gradients(made, torch.float64, numbers(B, T, C)))
        assert_near(results[-1], results[0], 1e-12, layout)
    made = layer("fused", kernel, bias=True)
    assert (results[0][0] - made(numbers(B, T, C))).norm() > 0.1  # and some it does drop


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_weights_are_dropped_with_the_given_probability_and_the_rest_scaled_up(kernel):
    b, h, t = 50, 4, 10
    equal, one_hot = torch.zeros(b, h, t, 1), torch.eye(t).expand(b, h, t, t)
    torch.manual_seed(0)
    weights = kernel(equal, equal, one_hot, None, False, 0.3)  # (b, h, t, t)
    kept = weights != 0
    assert torch.allclose(weights[kept], torch.tensor(1 / t / 0.7))
    for share in (
        kept,
        kept[:, 0],
        kept[:25],
        kept[:, :, 0],
        kept[..., 0],
    ):  # of all, of a head, of a query, of a key
        assert abs(share.float().mean() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / share.numel())


@every_pair
def test_dropout_of_the_output_is_apart_from_that_of_the_weights_and_off_when_not_training(
    layout, kernel
):
    x, plain = numbers(B, T, C), layer(layout, kernel)
    torch.manual_seed(0)
    y = layer(layout, kernel, dropout=0.5)(x)
    kept = y != 0
    assert 0 < kept.sum() < kept.numel()
    assert_near([y[kept]], [2 * plain(x)[kept]], 1e-12)
    both = layer(layout, kernel, dropout=0.5, attention_dropout=0.5).eval()
    assert torch.equal(both(x), plain(x))


# ---------------------------------------------------------------------------------------- the cache


@every_pair
def test_reading_in_chunks_through_the_cache_equals_one_pass(layout, kernel):
    generator = torch.Generator().manual_seed(0)
    for options in OPTIONS.values():
        made, x = layer(layout, kernel, **options), numbers(B, 9, C)
        whole = made(x)
        for _ in range(4):
            assert_near([torch.cat(read_in_chunks(made, x, generator), dim=1)], [whole], 1e-12)


def read_in_chunks(made, x, generator, mask=None):
    cache, outputs = KVCache(x.size(1)), []
    while (start := cache.length) < x.size(1):
        end = start + int(torch.randint(1, x.size(1) - start + 1, (), generator=generator))
        outputs.append(
            made(
                x[:, start:end],
                mask=None if mask is None else mask[..., start:end, :end],
                cache=cache,
            )
        )
    return outputs


@every_pair
def test_a_mask_holds_for_what_is_cached_too(layout, kernel):
    generator = torch.Generator().manual_seed(0)
    made, x = layer(layout, kernel, **OPTIONS["all"]), numbers(B, 9, C)
    for mask in (allowed(9, 9), added(B, 9, 9), added(1, H, 9, 9)):
        for _ in range(3):
            assert_near(
                [torch.cat(read_in_chunks(made, x, generator, mask), dim=1)],
                [made(x, mask=mask)],
                1e-12,
            )


# ----------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    "unknown layout 'fusd'; allowed: heads, separate, fused": lambda: MultiHeadAttention(
        6, 3, layout="fusd"
    ),
    "unknown kernel 'flash'; allowed: loop, bmm, batched, sdpa": lambda: MultiHeadAttention(
        6, 3, kernel="flash"
    ),
    "n_embd 6 is not divisible by n_head 4": lambda: MultiHeadAttention(6, 4),
    "head size 3 is odd": lambda: Rotary(3, 8),
    r"\(2, 4, 5\).* allowed: x \(B, T, 6\)": lambda: layer()(numbers(2, 4, 5)),
    r"\(4, 6\).* allowed: x \(B, T, 6\)": lambda: layer()(numbers(4, 6)),
    r"\(3, 5, 6\).* contexts \(B, S, 6\)": lambda: layer()(numbers(2, 4, 6), numbers(3, 5, 6)),
    r"\(2, 5, 1, 6\).* contexts": lambda: layer()(numbers(2, 4, 6), numbers(2, 5, 1, 6)),
    r"\(2, 4, 6\)\]; allowed: .* contexts": lambda: layer()(
        numbers(2, 4, 6), numbers(2, 5, 6), numbers(2, 4, 6)
    ),
    r"mask is \(4, 5\) torch.bool; allowed: .* T 4, S 4": lambda: layer()(
        numbers(2, 4, 6), mask=allowed(4, 5)
    ),
    r"mask is \(3, 4, 4\)": lambda: layer()(numbers(2, 4, 6), mask=allowed(3, 4, 4)),
    r"mask is \(2, 2, 4, 4\) .* H 3 or 1": lambda: layer()(
        numbers(2, 4, 6), mask=allowed(2, 2, 4, 4)
    ),
    r"mask is \(1, 2, 3, 4, 4\)": lambda: layer()(numbers(2, 4, 6), mask=allowed(1, 2, 3, 4, 4)),
    "mask is .* torch.int64; allowed: boolean": lambda: layer()(
        numbers(2, 4, 6), mask=allowed(4, 4).long()
    ),
    "a cache is for self-attention": lambda: layer()(
        numbers(2, 4, 6), numbers(2, 4, 6), cache=KVCache(8)
    ),
    "position 16 is out of range; allowed: 0 to 15": lambda: layer(rotary=True)(numbers(1, 17, 6)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_gets_a_clear_value_error(message):
    with pytest.raises(ValueError, match=message):
        MISTAKES[message]()


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_unit_rms_is_rms_norm_without_gains(dtype):
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = F.rms_norm(
        x.double(), (8,), eps=torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = rms_norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


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
