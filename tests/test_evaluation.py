"""The exact loss: every target once, for any batch size, without random numbers."""

import numpy as np
import pytest
import torch

from configs.schema import ModelConfig
from data.batches import Split, evaluation_windows
from model.gpt import GPT
from training.device import select_runtime
from training.evaluate import exact_loss

CPU = select_runtime("cpu", "float32")
MODEL = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.5)
IDS = np.random.default_rng(0).integers(0, 7, 101).astype(np.uint8)
SPLIT = Split(IDS, ((0, 40), (40, 101)))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_exact_loss_is_the_mean_over_all_targets(batch_size):
    model = GPT(MODEL, 7).eval()
    nats = []
    for start, end in SPLIT.segments:
        for first in range(start, end - 1, 8):
            last = min(first + 8, end - 1)
            logits = model(torch.from_numpy(IDS[first:last].astype(np.int64))[None])[0]
            targets = torch.from_numpy(IDS[first + 1 : last + 1].astype(np.int64))
            nats += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
    assert len(nats) == 39 + 60
    loss = exact_loss(model, evaluation_windows(SPLIT, 8, batch_size), CPU)
    assert loss == pytest.approx(sum(nats) / len(nats), abs=1e-6)


def test_evaluation_does_not_change_the_random_state():
    model = GPT(MODEL, 7).train()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = exact_loss(model, evaluation_windows(SPLIT, 8, 4), CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert exact_loss(model, evaluation_windows(SPLIT, 8, 4), CPU) == first
