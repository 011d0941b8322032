"""The model, from ids to logits, in every variant that the settings allow; a look inside it."""

import copy
import itertools
import math

import pytest
import torch

from configs.schema import KERNELS, LAYOUTS, ModelConfig
from convert import GPT2
from model import attention
from model.dropout import dropout
from model.gpt import GPT
from model.inspect import ablated, attention_maps, logit_lens
from model.parameters import named_tensors
from tests.runs import bits
from tests.variants import CHOICES, SIZES, noisy, random_model

ALL_CHOICES = CHOICES | {"residual_init": ("scaled", "zero")}
VARIANTS = [  # 25 of 768, among them every pair of choices
    dict(zip(ALL_CHOICES, values, strict=True))
    for values in list(itertools.product(*ALL_CHOICES.values()))[::31]
]
PAIRS = list(itertools.product(LAYOUTS, KERNELS))
IDS = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))


def build(seed=0, **changes):
    return GPT(ModelConfig(**SIZES | GPT2 | changes), 11, seed)


def test_first_loss_is_ln_v():
    """And every parameter gets a gradient."""
    for variant in VARIANTS:
        model = build(**variant)
        logits = model(IDS)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, IDS[:, 1:].flatten())
        assert loss.item() == pytest.approx(math.log(11), abs=0.15), variant
        noisy(model, 0.1)  # a zero-initialized output matrix passes no gradient to its input
        model(IDS).logsumexp(-1).sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters()), variant


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=map("-".join, PAIRS))
def test_causality(number):
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


def test_initial_weights_depend_on_the_seed():
    """Not on the layout, nor on the state of the default generator."""
    for layout, variant in itertools.product(LAYOUTS, VARIANTS[::4]):
        again = bits(named_tensors(build(**variant, layout=layout)))
        assert again == bits(named_tensors(build(**variant))), (layout, variant)
    assert not torch.equal(build(seed=1).lm_head.weight, build(seed=0).lm_head.weight)


def test_softcap_bounds_the_logits():
    assert 1.9 < noisy(build(logit_softcap=2.0), 30)(IDS).abs().max() <= 2.0


def test_dropout():
    """Each element with probability p, independent of the others; the mean stays."""
    x = torch.ones(1001, 3, 333, requires_grad=True)
    torch.manual_seed(0)
    y = dropout(x.transpose(0, 2), 0.05)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.transpose(0, 2))  # backward uses the mask and scale of forward
    assert torch.allclose(y[y != 0], torch.tensor(1 / 0.95), rtol=1e-4)
    kept = (y != 0).flatten()
    for lag in (0, 1, 2, 3, 4, 333, 1001, -(-kept.numel() // 4)):  # also in the same 64 bits
        expected = 0.95 if lag == 0 else 0.95**2
        assert abs((kept & kept.roll(lag)).double().mean() - expected) < 0.002, lag


# ----------------------------------------------------------------------------------- a look inside


@pytest.mark.parametrize("kernel", KERNELS)
def test_maps_are_the_weights_of_a_kernel(kernel, monkeypatch):
    """Called with the identity matrix as values, a kernel returns its weights."""
    model, ids, recorded = random_model(kernel=kernel), IDS[0], []
    compute = attention.KERNELS[kernel]

    def record(q, k, v, *rest):
        recorded.append(compute(q, k, torch.eye(8).expand(1, 2, 8, 8), *rest)[0])
        return compute(q, k, v, *rest)

    monkeypatch.setitem(attention.KERNELS, kernel, record)
    model(ids[None])
    for found, weights in zip(attention_maps(model, ids), recorded[:2], strict=True):
        assert torch.allclose(found, weights, rtol=0, atol=1e-5)


def test_logit_lens():
    """The logits of models that end after each block."""
    model, ids = random_model(), torch.tensor([1, 5, 2])
    first = copy.deepcopy(model)
    first.blocks = first.blocks[:1]
    with torch.inference_mode():
        expected = torch.cat([first(ids[None]), model(ids[None])])
    assert torch.equal(logit_lens(model, ids), expected)
    assert not torch.allclose(*expected, atol=1e-4)


def test_head_that_is_off():
    """It has zeros in the output projection, and comes back unchanged."""
    model, ids = build(n_head=3), torch.tensor([[1, 5, 2]])
    expected, before = copy.deepcopy(model), bits(model.state_dict())
    expected.blocks[0].attention.out_proj.weight.data[:, :4] = 0
    expected.blocks[1].attention.out_proj.weight.data[:, 8:12] = 0
    with pytest.raises(KeyError), ablated(model, [(0, 0), (1, 2)]):
        assert torch.equal(model(ids), expected(ids))
        raise KeyError
    assert bits(model.state_dict()) == before
