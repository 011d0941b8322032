"""Equivalence of the weight layouts: the same training in each, and bit-exact conversion."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from configs.schema import ModelConfig, TrainConfig
from convert import GPT2
from model.attention import LAYOUTS, MultiHeadAttention
from model.gpt import GPT
from model.parameters import load_tensors, named_tensors
from tests.runs import scalars, stop_at
from tests.runs import train as train_run
from training.optimizers import MOMENTS, build_optimizers, state_of

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 8}
CONFIG = ModelConfig(**SIZES, **GPT2, bias=True, kernel="batched", dropout=0.2)
VOCABULARY = 11


def new_run(config, optimizer):
    model = GPT(config, VOCABULARY, seed=1).double()
    return model, build_optimizers(model, TrainConfig(optimizer=optimizer), torch.float64)


def converted(run, config, optimizer):
    """Convert a model and its optimizers to the layout of a config, as checkpoints do."""
    other, others = new_run(config, optimizer)
    kinds, state = tensors_of(run), state_of(others)
    load_tensors(other, kinds.pop("model"))
    for kind, tensors in kinds.items():
        load_tensors(other, tensors, lambda p, kind=kind: state[p][kind])
    others[0].step_counts.copy_(run[1][0].step_counts[:1].expand(len(others[0].step_counts)))
    return other, others


def tensors_of(run):
    """Return all parameters and moments by kind and name."""
    model, optimizers = run
    state = state_of(optimizers)

    def of_kind(kind):
        return named_tensors(model, lambda parameter: state[parameter].get(kind))

    return {"model": named_tensors(model)} | {kind: of_kind(kind) for kind in MOMENTS}


def train(run, steps):
    """Train on rows that count up, each step with its own dropout seed; return the losses."""
    model, optimizers = run
    losses = []
    for step in steps:
        torch.manual_seed(step)
        ids = (torch.randint(VOCABULARY, (4, 1)) + torch.arange(9)) % VOCABULARY
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_of_layout_changes_no_weight_no_state_of_adamw_or_muon_and_no_loss(
    layout, optimizer
):
    """There and back again, in the middle of a training with biases and dropout."""
    first = new_run(CONFIG, optimizer)
    losses = train(first, range(3))
    second = converted(first, replace(CONFIG, layout=layout), optimizer)
    back = converted(second, CONFIG, optimizer)
    before = tensors_of(first)
    for after in (tensors_of(second), tensors_of(back)):
        assert list(after) == list(before)
        for kind in before:
            assert list(after[kind]) == list(before[kind])
            assert all(torch.equal(after[kind][name], before[kind][name]) for name in before[kind])
    expected = train(first, range(3, 12))
    assert train(second, range(3, 12)) == pytest.approx(expected, rel=0, abs=1e-9)
    assert expected[-1] < losses[0] - 0.5  # it has learned


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_attention_layer_without_a_model_is_converted_between_layouts_too(layout):
    layer, other = (MultiHeadAttention(12, 2, layout=each, bias=True) for each in (layout, "fused"))
    tensors = named_tensors(layer)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "qkv": (3, 2, 6, 12), "qkv.bias": (3, 2, 6), "out_proj": (12, 12), "out_proj.bias": (12,),
    }  # fmt: skip
    load_tensors(other, tensors)
    x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(other(x), layer(x), atol=1e-6)


def stop_and_go_on_in(layout, options, uninterrupted, run):
    stop_at(9, *options, f"--out_dir={run}")
    assert train_run(run, f"--layout={layout}")[0] == 0
    for tag in ("train/loss", "val/loss"):
        expected, found = (
            [loss for _, loss in scalars(each)[tag]] for each in (uninterrupted, run)
        )
        assert found == pytest.approx(expected, rel=0, abs=1e-6)


def test_a_stopped_run_goes_on_in_another_layout(options, uninterrupted, tmp_path):
    """Bit-exact in its own one (tests/test_resume.py), within 1e-6 in another."""
    stop_and_go_on_in("heads", options, uninterrupted, tmp_path / "run")
