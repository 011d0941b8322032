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
IDS = np.random.default_rng(0).integers(0, 7, 101).astype(np.uint8)
SPLIT = Split(IDS, ((0, 40), (40, 101)))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_exact_loss_is_the_mean_over_all_targets_and_draws_no_random_numbers(batch_size):
    model, nats = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.5), 7), []
    for start, end in SPLIT.segments:
        for first in range(start, end - 1, 8):
            ids = torch.from_numpy(IDS[first : min(first + 9, end)]).long()
            logits = model.eval()(ids[None, :-1])[0]
            nats += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").tolist()
    assert len(nats) == 39 + 60
    state = torch.get_rng_state()
    loss = exact_loss(model.train(), evaluation_windows(SPLIT, 8, batch_size), CPU)
    assert loss == pytest.approx(np.mean(nats), abs=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
