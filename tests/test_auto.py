"""`auto` in the settings: what it stands for, and what a checkpoint keeps of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.schema import Config, ModelConfig, TrainConfig
from data.batches import Split
from model.attention import KERNELS, MultiHeadAttention, fastest_kernel
from tests.texts import load, write
from training.state import resolve_auto


@pytest.mark.parametrize(
    ("epochs", "n_embd", "characters", "dropout"),
    [
        (0.1, 128, 10**5, 0), (2.9, 128, 10**5, 0), (5, 128, 10**5, 0.05), (99, 128, 10**5, 0.3),
        # a model too small to memorize its text: 300 KB read ten times, see docs/research.md
        (10, 64, 300_000, 0), (10, 128, 300_000, 0), (10, 192, 300_000, 0.2),
    ],
)  # fmt: skip
def test_auto_dropout(epochs, n_embd, characters, dropout, tmp_path):
    corpus = load(write(f"{tmp_path}/book.txt"))
    corpus = replace(corpus, train=Split(np.zeros(characters, np.uint8)), val=())
    layers = 4 if n_embd == 128 and characters == 10**5 else 2
    model = ModelConfig(dropout="auto", n_layer=layers, n_embd=n_embd, block_size=100)
    train = TrainConfig(batch_size=10, max_iters=round(epochs * characters / 1000) + 1)
    assert resolve_auto(Config(model=model, train=train), corpus).model.dropout == dropout


@pytest.mark.parametrize(("max_iters", "interval"), [(200, 20), (711, 72), (20, 10), (1, 10)])
def test_auto_eval_interval(max_iters, interval, tmp_path):
    """A run is evaluated ten times, but at least ten steps lie between."""
    settings = Config(train=TrainConfig(max_iters=max_iters, eval_interval="auto"))
    corpus = load(write(f"{tmp_path}/book.txt"))
    assert resolve_auto(settings, corpus).train.eval_interval == interval


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "kernel"),
    [
        ("cpu", torch.bfloat16, 1024, "batched"), ("cpu", torch.bfloat16, 1025, "sdpa"),
        ("cpu", torch.float32, 64, "sdpa"), ("cuda", torch.bfloat16, 64, "sdpa"),
    ],
)  # fmt: skip
def test_auto_kernel(device, dtype, tokens, kernel, monkeypatch):
    assert fastest_kernel(dtype, torch.device(device), tokens) == kernel
    if device == "cpu":
        called = []
        monkeypatch.setitem(KERNELS, kernel, lambda q, *_: called.append(kernel) or q)
        layer = MultiHeadAttention(8, 2, kernel="auto").to(dtype)
        layer(torch.zeros(1, tokens, 8, dtype=dtype))
        assert called == [kernel]
