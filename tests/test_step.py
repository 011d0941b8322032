"""A step: what it returns, and how often it waits for the device."""

import numpy as np
import pytest
import torch

from configs.schema import LAYOUTS, Config, ModelConfig, TrainConfig
from data.batches import IGNORE_INDEX
from model.gpt import cross_entropy
from tests.texts import load, write
from tests.variants import SIZES
from train import train_step
from training.device import Runtime
from training.distributed import World
from training.state import Run

TRAIN = TrainConfig(optimizer="muon", gradient_accumulation_steps=3, batch_size=4)


def run_on(device, corpus, **choices):
    """Return a small run on a device."""
    settings = Config(model=ModelConfig(**SIZES | choices), train=TRAIN)
    return Run(settings, corpus, Runtime(torch.device(device), torch.float32), World())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_waits_for_the_device_once(layout, tmp_path, monkeypatch):
    """On `meta`, where to read a number is an error, and so is a tensor on the CPU."""
    reads = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: reads.append(1) or [1.0, 1.0])
    corpus = load(write(f"{tmp_path}/book.txt", "What is said is said, and done.\n" * 2))
    train_step(run_on("meta", corpus, layout=layout, dropout=0.1, attention_dropout=0.1))
    assert len(reads) == 1


@pytest.mark.parametrize("targets", [True, False])
def test_step_of_micro_batches(targets, tmp_path):
    """Its loss is the mean over all targets, of which some micro-batches may have none."""
    items = write(f"{tmp_path}/sums.txt", "".join(f"{'question' * 3}{n}={n}\n" for n in range(40)))
    lists = {} if targets else {"separator": "\\n", "answer_after": "="}
    run = run_on("cpu", load(items, **lists))
    batches = [run.batches[i] for i in range(3)]
    x, y = (torch.from_numpy(np.concatenate(ids)) for ids in zip(*batches, strict=True))
    counts = [np.count_nonzero(ids != IGNORE_INDEX) for _, ids in batches]
    assert (min(counts) > 0) == targets and sum(counts) > 0
    with torch.no_grad():
        expected = cross_entropy(run.model(x), y).item()
    result = train_step(run)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.n_predictions == sum(counts)
