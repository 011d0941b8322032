"""Equivalence of the weight layouts: the same training in each, and bit-exact conversion."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from configs.schema import ModelConfig, TrainConfig
from convert import GPT2
from model.attention import LAYOUTS
from model.gpt import GPT
from model.parameters import load_tensors, named_tensors
from training.optimizers import MOMENTS, build_optimizers, state_of

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 8}
CONFIG = ModelConfig(**SIZES, **GPT2, bias=True, kernel="batched", dropout=0.2)
VOCABULARY = 11


def new_run(config, optimizer):
    model = GPT(config, VOCABULARY, seed=1).double()
    return model, build_optimizers(model, TrainConfig(optimizer=optimizer), torch.float64)


def converted(run, optimizer, layout):
    """Convert a model and its optimizers to another layout, as checkpoints do."""
    other, others = new_run(dataclasses.replace(CONFIG, layout=layout), optimizer)
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
    moments = {kind: tensors_of_kind(model, state, kind) for kind in MOMENTS}
    return {"model": named_tensors(model)} | moments


def tensors_of_kind(model, state, kind):
    return named_tensors(model, lambda parameter: state[parameter].get(kind))


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
def test_a_change_of_layout_changes_no_weight_no_optimizer_state_and_no_loss(layout, optimizer):
    first = new_run(CONFIG, optimizer)
    losses = train(first, range(5))
    second = converted(first, optimizer, layout)
    before, after = tensors_of(first), tensors_of(second)
    assert list(after) == list(before)
    for kind in before:
        assert list(after[kind]) == list(before[kind])
        assert all(torch.equal(after[kind][name], before[kind][name]) for name in before[kind])
    expected = train(first, range(5, 15))
    assert train(second, range(5, 15)) == pytest.approx(expected, rel=0, abs=1e-9)
    assert expected[-1] < losses[0] - 1  # it has learned
