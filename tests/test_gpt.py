"""The model, from ids to logits, in every variant that the settings allow."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch

from configs.command import parse_train
from configs.schema import KERNELS, LAYOUTS, ModelConfig
from convert import GPT2
from model.dropout import dropout
from model.gpt import GPT
from model.inspect import ablated, logit_lens
from model.parameters import named_tensors, parameter_count
from tests.runs import equal
from tests.variants import CHOICES, choices_of, noisy

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, **GPT2)
ALL_CHOICES = CHOICES | {"residual_init": ("scaled", "zero")}
VARIANTS = [  # 25 of 768, among them every pair of choices
    dict(zip(ALL_CHOICES, values, strict=True))
    for values in list(itertools.product(*ALL_CHOICES.values()))[::31]
]
PAIRS = list(itertools.product(LAYOUTS, KERNELS))
IDS = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))


def build(seed=0, **changes):
    return GPT(dataclasses.replace(SMALL, **changes), 11, seed)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_every_variant_starts_near_a_loss_of_ln_v_and_every_parameter_gets_a_gradient(variant):
    model = build(**variant)
    loss = torch.nn.functional.cross_entropy(model(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(11), abs=0.15)
    noisy(model, 0.1)  # a zero-initialized output matrix passes no gradient to its input
    model(IDS).logsumexp(-1).sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in model.parameters())


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=map("-".join, PAIRS))
def test_future_tokens_have_no_influence(number):
    """In every layout and kernel, each in another variant: no change, and no gradient."""
    layout, kernel = PAIRS[number]
    variant = VARIANTS[number % len(VARIANTS)] | {"residual_init": "scaled"}
    model = build(**variant, layout=layout, kernel=kernel)
    embedded = []
    model.token_embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
    logits = model(IDS)
    for t in range(8):
        edited = IDS.clone()
        edited[:, t + 1 :] = (edited[:, t + 1 :] + 1 + t) % 11
        assert torch.equal(model(edited)[:, : t + 1], logits[:, : t + 1])
        total = logits[:, t].square().sum()
        (grad,) = torch.autograd.grad(total, embedded[0], retain_graph=True)
        assert grad[:, t + 1 :].eq(0).all() and grad[:, : t + 1].ne(0).any(-1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_depend_on_the_seed_and_not_on_the_layout(layout):
    """Not on the layout, nor on the state of the default generator."""
    for variant in VARIANTS[::4]:
        first = named_tensors(build(**variant))
        again = named_tensors(build(**variant, layout=layout))
        assert list(first) == list(again)
        assert all(torch.equal(again[name], first[name]) for name in first), variant
    assert not torch.equal(build(seed=1).lm_head.weight, build(seed=0).lm_head.weight)


def test_initialization_is_that_of_gpt2():
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 64}
    model = GPT(ModelConfig(**sizes, **GPT2 | {"n_previous": 1, "tied": False}), 65)
    embeddings = [model.token_embedding, model.position_embedding, *model.previous_embeddings]
    weights = [module.weight for module in (*embeddings, model.lm_head)]
    outputs = []
    for block in model.blocks:
        weights += [block.mlp.up.weight, block.attention.projection.qkv.weight]
        outputs += [block.mlp.down.weight, block.attention.out_proj.weight]
    for weight in weights:
        assert weight.std().item() == pytest.approx(0.02, rel=0.03)
    for weight in outputs:
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.03)
    for block in build(residual_init="zero").blocks:
        assert not block.mlp.down.weight.any() and not block.attention.out_proj.weight.any()


def test_parameter_counts_equal_nanogpts():
    for device, count in (("cpu", 795_904), ("gpu", 10_646_784)):
        command = parse_train([f"configs/nanogpt_{device}.yaml", "--kernel=sdpa"])
        assert parameter_count(GPT(command.new_settings().model, 65)) == count


def test_ids_that_do_not_fit_are_refused_and_leave_the_cache_as_it_was():
    model = build(n_previous=3).eval()
    cache = model.new_cache()
    model(IDS[:, :6], cache)
    for ids, message in (
        (IDS[0, 6:], r"ids must be \(B, T\) .* not \(2,\)"),
        (IDS[:, :3], "9 tokens exceed block_size 8"),
        (IDS[:2, 6:], "ids are 2 texts, the cache holds 3"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, cache)
    torch.testing.assert_close(model(IDS[:, 6:], cache), model(IDS)[:, 6:])


def test_with_a_cache_each_token_continues_the_text_even_if_the_memory_of_the_ids_is_reused():
    model, token = build(n_previous=3).eval(), torch.empty_like(IDS[:, :1])
    cache = model.new_cache()
    logits = [model(token.copy_(IDS[:, t : t + 1]), cache) for t in range(8)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(IDS))


def test_the_softcap_bounds_the_logits_and_logit_scale_multiplies_them_except_in_training():
    model, scaled = (noisy(build(logit_softcap=2.0, logit_scale=s), 30) for s in (1.0, 0.5))
    assert 1.9 < model(IDS).abs().max() <= 2.0
    assert torch.equal(model.train()(IDS), scaled.train()(IDS))
    assert torch.equal(model.eval()(IDS) / 2, scaled.eval()(IDS))


@pytest.mark.parametrize("p, dtype", [(0.05, torch.float32), (0.5, torch.bfloat16)])
def test_dropout_drops_each_element_independently_with_probability_p_and_preserves_the_mean(
    p, dtype
):
    x = torch.ones(1001, 3, 333, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    y = dropout(x.transpose(0, 2), p)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == (333, 3, 1001) and y.dtype == dtype
    assert torch.equal(gradient, y.transpose(0, 2))  # backward uses the mask and scale of forward
    kept = (y != 0).flatten()
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p), dtype=dtype), rtol=5e-3)
    # elements of the same draw, then of others
    for lag in (0, 1, 2, 3, 4, 333, 1001, -(-kept.numel() // 4)):
        expected = (1 - p) if lag == 0 else (1 - p) ** 2
        tolerance = 6 * (expected * (1 - expected) / kept.numel()) ** 0.5
        assert abs((kept & kept.roll(lag)).double().mean() - expected) < tolerance, lag


def test_the_logit_lens_gives_the_logits_of_models_that_end_after_each_block():
    model, ids = build(**choices_of("shakespeare")).eval(), torch.tensor([1, 5, 2])
    first = copy.deepcopy(model)
    first.blocks = first.blocks[:1]
    with torch.inference_mode():
        expected = torch.cat([first(ids[None]), model(ids[None])])
    assert torch.equal(logit_lens(model, ids), expected)
    assert not torch.allclose(*expected, atol=1e-4)


def test_a_head_that_is_off_has_zeros_in_the_output_projection_and_comes_back_unchanged():
    model, ids = build(n_head=4), torch.tensor([[1, 5, 2]])
    expected, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    expected.blocks[0].attention.out_proj.weight.data[:, :4] = 0
    expected.blocks[1].attention.out_proj.weight.data[:, 8:12] = 0
    with pytest.raises(KeyError), ablated(model, [(0, 0), (1, 2)]):
        assert torch.equal(model(ids), expected(ids))
        raise KeyError
    assert equal(dict(model.state_dict()), dict(before))
    refused = pytest.raises(ValueError, match=r"allowed: heads 0 to 3 in layers 0 to 1$")
    with refused, ablated(model, [(0, 4)]):
        pass
