"""Equivalence of the weight layouts: the same model, optimizer matrices and training in each, and
bit-exact conversion between any two.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from torch.nn import functional as F

from configs.schema import ModelConfig, TrainConfig
from model.attention import KERNELS, LAYOUTS, MultiHeadAttention
from model.gpt import GPT
from tests.variants import concatenated, copy_optimizers, in_layout
from training.optimizers import build

CLASSIC = ModelConfig(n_layer=2, n_head=2, n_embd=12, block_size=8, bias=True)
MODERN = dataclasses.replace(
    CLASSIC, bias=False, positions="rope", norm="rmsnorm", mlp="relu2", qk_norm=True
)
VOCABULARY = 11

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_optimizer = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def gpt(config=CLASSIC, **changes):
    return GPT(dataclasses.replace(config, **changes), VOCABULARY, seed=1).double()


def batch(step):
    """Return x and y (4, 8): rows that count up by 1, 2 or 3, predictable from two characters."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    hop = torch.randint(1, 4, (4, 1), generator=generator)
    ids = (start + hop * torch.arange(9)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


def train(model, optimizers, steps):
    """Train for `steps`, each with its own batch and dropout seed; return the losses."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        x, y = batch(step)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------------- head_weights


@every_layout
@pytest.mark.parametrize("bias", [False, True])
def test_head_weights_cover_every_element_of_the_layout_exactly_once(layout, bias):
    C, H, D = 12, 3, 5
    projection = LAYOUTS[layout](C, H, D, bias)
    counts = {parameter: torch.zeros_like(parameter) for parameter in projection.parameters()}
    for h in range(H):
        views = projection.head_weights(h, tensor_of=counts.__getitem__)
        assert [tuple(view.shape) for view in views] == [(D, C)] * 3 + [(D,)] * 3 * bias
        for view in views:
            view += 1
    assert all(count.eq(1).all() for count in counts.values())


@every_layout
def test_each_head_is_projected_by_its_head_weights(layout):
    projection = LAYOUTS[layout](12, 3, 5, True).double()
    x = torch.randn(2, 4, 12, dtype=torch.float64)
    for parameter in projection.parameters():
        torch.nn.init.normal_(parameter)
    for h in range(3):
        weights, biases = projection.head_weights(h)[:3], projection.head_weights(h)[3:]
        for part, weight, bias in zip(projection.project(x), weights, biases, strict=True):
            assert torch.allclose(part[:, h], F.linear(x, weight, bias), rtol=0, atol=1e-13)


@every_layout
def test_a_seed_gives_the_same_layer_in_every_layout(layout):
    def initialized_weights(name, generator):
        layer = MultiHeadAttention(12, 3, layout=name, head_size=5, bias=True)
        layer.reset_parameters(generator, 0.1, 0.2)
        return [view for h in range(3) for view in layer.projection.head_weights(h)] + list(
            layer.out_proj.parameters()
        )

    for seeded in (lambda: torch.Generator().manual_seed(5), lambda: torch.manual_seed(5) and None):
        for ours, fused in zip(
            initialized_weights(layout, seeded()),
            initialized_weights("fused", seeded()),
            strict=True,
        ):
            assert torch.equal(ours, fused) and (ours.any() or ours.dim() == 1)


# --------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
def test_conversion_to_another_layout_and_back_is_bit_exact(source, target):
    model = gpt(attention=source)
    train(model, build(model, TrainConfig(), torch.float64), range(2))
    converted = in_layout(model, target)
    back = in_layout(converted, source)
    for name, parameter in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], parameter), name
    ours, theirs = concatenated(converted.named_slices()), concatenated(model.named_slices())
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("config", [CLASSIC, MODERN], ids=["classic", "modern"])
@pytest.mark.parametrize(("layout", "kernel"), list(itertools.product(LAYOUTS, KERNELS)))
def test_every_layout_and_kernel_gives_the_same_logits(layout, kernel, config):
    model, (x, _) = gpt(config), batch(0)
    other = in_layout(model, layout, kernel)
    assert (other.config.attention, other.config.kernel) == (layout, kernel)
    assert torch.allclose(other(x), model(x), rtol=0, atol=1e-12)


def test_conversion_preserves_dtype_mode_and_other_settings_and_shares_no_memory():
    model = gpt(MODERN, attention="stacked", kernel="loop").bfloat16().eval()
    for other in (in_layout(model), in_layout(model, "heads"), in_layout(model, kernel="bmm")):
        assert not other.training and other.lm_head.weight.dtype == torch.bfloat16
        assert other.config.kernel in ("loop", "bmm")
        assert other.config.attention in ("stacked", "heads")
        addresses = {parameter.data_ptr() for parameter in model.parameters()}
        assert addresses.isdisjoint(parameter.data_ptr() for parameter in other.parameters())
    with pytest.raises(ValueError, match="unroled"):
        in_layout(model, "unroled")


# ----------------------------------------------------------------------------- optimizers, training


@every_layout
def test_block_matrices_are_the_same_in_every_layout(layout):
    C = CLASSIC.n_embd
    ours, fused = (
        list(map(torch.cat, gpt(attention=name).block_matrices())) for name in (layout, "fused")
    )
    shapes = [*[(C, C)] * 4, (4 * C, C), (C, 4 * C)] * CLASSIC.n_layer
    assert [tuple(matrix.shape) for matrix in ours] == shapes
    assert all(torch.equal(actual, expected) for actual, expected in zip(ours, fused, strict=True))
    q_k_v = gpt().blocks[1].attention.projection.qkv.weight.chunk(3)  # fused layout
    assert all(torch.equal(actual, part) for actual, part in zip(ours[6:9], q_k_v, strict=True))


@every_layout
@every_optimizer
def test_weight_decay_acts_on_the_same_matrices_in_every_layout_and_on_no_bias(layout, optimizer):
    model = gpt(attention=layout)
    with torch.no_grad():
        for views in model.named_slices().values():
            for view in views:
                view.add_(torch.rand(view.shape, dtype=torch.float64))
    before = concatenated(model.named_slices())
    settings = TrainConfig(
        optimizer=optimizer, learning_rate=0.1, muon_learning_rate=0.1, weight_decay=0.5
    )
    optimizers = build(model, settings, torch.float64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for each in optimizers:
        each.step()
    for name, tensor in concatenated(model.named_slices()).items():
        old = before[name]
        expected = old * (1 - 0.1 * 0.5) if old.dim() == 2 else old
        assert torch.allclose(tensor, expected, rtol=0, atol=1e-15), name


@functools.cache
def default_losses(optimizer, config, dropout):
    model = gpt(config, kernel="batched", dropout=dropout)
    return train(model, build(model, TrainConfig(optimizer=optimizer), torch.float64), range(30))


@every_layout
@every_optimizer
@pytest.mark.parametrize(("config", "dropout"), [(CLASSIC, 0.0), (CLASSIC, 0.2), (MODERN, 0.0)])
def test_thirty_steps_have_the_same_losses_in_every_layout(layout, optimizer, config, dropout):
    model = gpt(config, kernel="batched", attention=layout, dropout=dropout)
    losses = train(model, build(model, TrainConfig(optimizer=optimizer), torch.float64), range(30))
    assert losses == pytest.approx(default_losses(optimizer, config, dropout), rel=0, abs=1e-9)
    assert losses[-1] < losses[0] - 0.15  # with dropout: 0.17 to 0.22, depending on the masks


@pytest.mark.parametrize("kernel", KERNELS)
@every_optimizer
def test_thirty_steps_have_the_same_losses_in_every_kernel(kernel, optimizer):
    model = gpt(kernel=kernel)
    losses = train(model, build(model, TrainConfig(optimizer=optimizer), torch.float64), range(30))
    assert losses == pytest.approx(default_losses(optimizer, CLASSIC, 0.0), rel=0, abs=1e-9)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
@every_optimizer
def test_conversion_of_the_optimizer_state_and_back_is_bit_exact(source, target, optimizer):
    settings = TrainConfig(optimizer=optimizer)
    model = gpt(attention=source)
    optimizers = build(model, settings, torch.float64)
    train(model, optimizers, range(2))
    converted, back = in_layout(model, target), in_layout(model, source)
    converted_optimizers, back_optimizers = (
        build(each, settings, torch.float64) for each in (converted, back)
    )
    copy_optimizers(model, optimizers, converted, converted_optimizers)
    copy_optimizers(converted, converted_optimizers, back, back_optimizers)
    for ours, theirs in zip(back_optimizers, optimizers, strict=True):
        for actual, expected in zip(ours.state.values(), theirs.state.values(), strict=True):
            assert actual.keys() == expected.keys()
            assert all(
                torch.equal(actual[name], expected[name]) and actual[name].any() for name in actual
            )
    assert back_optimizers[0].steps == optimizers[0].steps == 2
