"""`auto` in the settings: what it stands for, and what a checkpoint keeps of it."""

from dataclasses import replace

import pytest
import torch

from configs.schema import Config, ModelConfig, TrainConfig
from model.attention import KERNELS, MultiHeadAttention, fastest_kernel
from storage import load_model
from storage.checkpoint import LAST, load_checkpoint
from tests.runs import train, train_and_copy
from tests.texts import load, write
from training.state import resolve

AUTO = Config(model=ModelConfig(dropout="auto"), train=TrainConfig(eval_interval="auto"))


@pytest.fixture
def corpus_of(tmp_path):
    """A function that returns a corpus which claims to have some number of characters."""
    corpus = load(write(f"{tmp_path}/book.txt", "What is said is said.\n" * 5))
    return lambda characters: replace(corpus, characters=characters)


@pytest.mark.parametrize(("epochs", "dropout"), [(0.1, 0), (2.9, 0), (5, 0.05), (99, 0.3)])
def test_dropout_rises_with_the_number_of_epochs(epochs, dropout, corpus_of):
    assert resolve(AUTO, epochs, corpus_of(10**5)).model.dropout == dropout


@pytest.mark.parametrize(("n_embd", "dropout"), [(64, 0), (128, 0), (192, 0.2)])
def test_a_model_too_small_to_memorize_its_text_has_no_dropout(n_embd, dropout, corpus_of):
    """300 KB read ten times: see docs/research.md."""
    sized = replace(AUTO, model=replace(AUTO.model, n_layer=2, n_embd=n_embd))
    assert resolve(sized, 10, corpus_of(300_000)).model.dropout == dropout


@pytest.mark.parametrize(("max_iters", "interval"), [(60, 6), (1, 1), (71, 8)])
def test_a_run_is_evaluated_ten_times(max_iters, interval, corpus_of):
    settings = replace(AUTO, train=replace(AUTO.train, max_iters=max_iters))
    assert resolve(settings, 1, corpus_of(10**6)).train.eval_interval == interval


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "kernel"),
    [
        ("cpu", torch.bfloat16, 1024, "batched"), ("cpu", torch.bfloat16, 1025, "sdpa"),
        ("cpu", torch.float32, 64, "sdpa"), ("cuda", torch.bfloat16, 64, "sdpa"),
    ],
)  # fmt: skip
def test_kernel_auto_is_the_fastest_one_to_train_with(device, dtype, tokens, kernel, monkeypatch):
    assert fastest_kernel(dtype, torch.device(device), tokens) == kernel
    if device == "cpu":
        called = []
        monkeypatch.setitem(KERNELS, kernel, lambda q, *_: called.append(kernel) or q)
        layer = MultiHeadAttention(8, 2, kernel="auto").to(dtype)
        layer(torch.zeros(1, tokens, 8, dtype=dtype))
        assert called == [kernel]


def test_a_checkpoint_has_numbers_for_dropout_and_interval_and_the_words_for_the_machine(
    options, tmp_path
):
    words = ["--dropout=auto", "--eval_interval=auto", "--kernel=auto", "--device=auto"]
    code, output = train(*options, *words, "--n_embd=32", f"--out_dir={tmp_path / 'run'}")
    assert code == 0, output
    settings = load_checkpoint(tmp_path / "run" / LAST).settings
    assert (settings.model.dropout, settings.train.eval_interval) == (0.0, 3)
    assert (settings.model.kernel, settings.device) == ("auto", "auto")


def test_logit_scale_follows_the_epochs_read_when_a_run_is_evaluated_or_saved(options, tmp_path):
    """`settings` keeps the word; whoever loads the model finds the number of these weights."""
    words = ["--batch_size=16", "--max_iters=60", "--logit_scale=auto"]
    at_step_20 = train_and_copy(tmp_path / "run", 20, *options, *words)
    # a batch of 2 * 16 windows reads 1/11 of the text
    for folder, scale in ((at_step_20, 0.94), (tmp_path / "run", 0.83)):
        checkpoint = load_checkpoint(folder / LAST)
        assert checkpoint.settings.model.logit_scale == "auto"
        assert checkpoint.model.logit_scale == scale
        assert load_model(checkpoint.path)[0].config.logit_scale == scale
