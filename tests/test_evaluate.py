"""Evaluation: the exact loss has every target once, for any batch size; nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data.batches import Split, evaluation_windows
from tests.runs import SMALL, bits, build
from tests.variants import random_model
from training.device import select_runtime
from training.evaluate import evaluate, exact_loss
from training.samples import attention_images, sample_texts

CPU = select_runtime("cpu", "float32")


@pytest.mark.parametrize("batch_size", [1, 64])
def test_exact_loss(batch_size):
    """It is the mean over all targets."""
    model, nats = random_model(vocab_size=7, dropout=0.5), []
    ids = torch.randint(7, (101,))
    split = Split(ids.numpy().astype(np.uint8), ((0, 40), (40, 101)))
    for start, end in split.documents:
        for first in range(start, end - 1, 8):
            window = ids[first : min(first + 9, end)]
            logits = model(window[None, :-1])[0]
            nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="none").tolist()
    loss = exact_loss(model.train(), evaluation_windows(split, 8, batch_size), CPU)
    assert loss == pytest.approx(np.mean(nats), abs=1e-6)


def run_on_sums(folder, *options):
    """Build a small run on sums."""
    (folder / "sums.txt").write_text("".join(f"{n}={n * 7}\n" for n in range(1000)))
    return build(*SMALL, f"--sources={folder}/sums.txt", *options)


def test_evaluation_changes_nothing(tmp_path):
    run = run_on_sums(tmp_path, "--separator=\\n", "--answer_after==")
    weights, progress = bits(run.model.state_dict()), replace(run.progress)
    state = torch.get_rng_state()
    assert sample_texts(run, evaluate(run)) and attention_images(run)
    assert bits(run.model.state_dict()) == weights and run.progress == progress
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("max_val_chars", "predicted"), [(0, 872), (500, 496), (250_000, 872)])
def test_max_val_chars(max_val_chars, predicted, tmp_path):
    """An evaluation predicts so many characters, spread over the validation text, or all."""
    run = run_on_sums(tmp_path, f"--max_val_chars={max_val_chars}")
    assert evaluate(run).val_losses.counts.sum() == predicted
    assert run.val_excerpt.documents[0][0] == 0
    assert run.val_excerpt.documents[-1][1] == len(run.corpus.val)
