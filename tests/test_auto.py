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


@pytest.fixture
def corpus(tmp_path):
    return load(write(f"{tmp_path}/book.txt"))


@pytest.mark.parametrize(
    ("epochs", "n_embd", "dropout"),
    # the last model is too small to memorize its text
    [(2.9, 128, 0), (5, 128, 0.05), (99, 128, 0.3), (10, 64, 0)],
)
def test_auto_dropout(epochs, n_embd, dropout, corpus):
    corpus = replace(corpus, train=Split(np.zeros(50_000)), val=Split(np.zeros(50_000)))
    model = ModelConfig(dropout="auto", n_layer=2, n_embd=n_embd, block_size=100)
    # an epoch is 100.2 steps
    train = TrainConfig(batch_size=1, gradient_accumulation_steps=5, max_iters=int(101 * epochs))
    assert resolve_auto(Config(model=model, train=train), corpus).model.dropout == dropout


@pytest.mark.parametrize(("max_iters", "interval"), [(711, 72), (20, 10)])
def test_auto_eval_interval(max_iters, interval, corpus):
    """A run is evaluated ten times, but at least ten steps lie between."""
    settings = Config(train=TrainConfig(max_iters=max_iters, eval_interval="auto"))
    assert resolve_auto(settings, corpus).train.eval_interval == interval


@pytest.mark.parametrize(
    ("dtype", "tokens", "kernel"),
    [(torch.bfloat16, 1024, "batched"), (torch.bfloat16, 1025, "sdpa"), (torch.float32, 8, "sdpa")],
)
def test_auto_kernel(dtype, tokens, kernel, monkeypatch):
    called = []
    monkeypatch.setitem(KERNELS, kernel, lambda q, *_: called.append(kernel) or q)
    layer = MultiHeadAttention(8, 2, kernel="auto").to(dtype)
    layer(torch.zeros(1, tokens, 8, dtype=dtype))
    assert called == [kernel]
    assert fastest_kernel(dtype, torch.device("cuda"), tokens) == "sdpa"
