"""A step: what it returns, and how often it waits for the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.schema import KERNELS, LAYOUTS, Config, ModelConfig, TrainConfig
from convert import GPT2
from data.batches import IGNORE_INDEX
from model.gpt import cross_entropy
from tests.texts import load, write
from train import train_step
from training.device import Runtime
from training.distributed import World
from training.state import Run

MODEL = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8)
STEPS = {"optimizer": "muon", "gradient_accumulation_steps": 3, "batch_size": 4}


class ReadsOfNumbers(TorchDispatchMode):
    """A count of what waits for a GPU: `.item()`, `float()` and `bool()` of a tensor."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class OnTheDevice(TorchDispatchMode):
    """A check that a step computes on its device, here `meta`, and a count of what is copied to it.

    What comes from NumPy is on the CPU (lift_fresh), until it is copied (_to_copy).
    """

    copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.lift_fresh.default:
            return result
        tensors = [result]
        if function is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            self.copies += 1
        else:
            tensors += [args, kwargs]
        leaves = filter(torch.is_tensor, tree_leaves(tensors))
        assert all(tensor.device.type == "meta" for tensor in leaves), function
        return result


def run_of(corpus, device="cpu", model=MODEL, **train) -> Run:
    """Return a run of a small model."""
    config = Config(model=model, train=TrainConfig(**train))
    return Run(config, corpus, Runtime(torch.device(device), torch.float32), World())


@pytest.fixture
def text(tmp_path):
    return write(f"{tmp_path}/book.txt", "What is said is said, and done.\n" * 2)


def test_step_waits_for_the_device_once(text, monkeypatch):
    run, to_list, lists = run_of(load(text), **STEPS), torch.Tensor.tolist, []
    train_step(run)  # the first one may build what is kept
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: lists.append(1) or to_list(self))
    with ReadsOfNumbers() as reads:
        train_step(run)
    assert len(lists) == 1 and reads.count == 0


@pytest.mark.parametrize("variant", [{}, GPT2 | {"attention_dropout": 0.1}], ids=len)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_makes_nothing_on_the_cpu(layout, variant, text, monkeypatch):
    """A GPU would wait for it: forward and backward pass, clipping and update, in every kernel."""
    kernel = KERNELS[(LAYOUTS.index(layout) + len(variant)) % len(KERNELS)]
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: [1.0, 1.0])  # `meta` has no numbers
    model = replace(MODEL, layout=layout, kernel=kernel, dropout=0.1, **variant)
    run = run_of(load(text), "meta", model, **STEPS)
    with OnTheDevice() as mode:
        train_step(run)
    assert mode.copies == 6  # x and y of three micro-batches


@pytest.mark.parametrize("targets", [True, False])
def test_step_of_micro_batches(targets, text):
    """Its loss is the mean over all targets, of which some micro-batches may have none."""
    lists = {"separator": "\\n", "answer_after": "="}
    items = write(f"{text}.list", "".join(f"{'question' * 3}{n}={n}\n" for n in range(40)))
    run = run_of(load(text) if targets else load(items, **lists), **STEPS)
    batches = [run.batches[i] for i in range(3)]
    x, y = (torch.from_numpy(np.concatenate(ids)) for ids in zip(*batches, strict=True))
    counts = [int((ids != IGNORE_INDEX).sum()) for _, ids in batches]
    assert (min(counts) > 0) == targets and sum(counts) > 0
    with torch.no_grad():
        expected = cross_entropy(run.model.train()(x), y).item()
    result = train_step(run)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.n_predictions == sum(counts)
