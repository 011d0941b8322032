"""Evaluation: the exact loss has every target once, for any batch size; nothing else changes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.schema import Config, DataConfig, ModelConfig
from data.batches import Split, evaluation_windows
from data.corpus import load_corpus
from model.gpt import GPT
from tests.runs import bits
from training.device import select_runtime
from training.distributed import World
from training.evaluate import evaluate, exact_loss
from training.samples import attention_images, sample_texts
from training.state import Run

CPU = select_runtime("cpu", "float32")
IDS = np.random.default_rng(0).integers(0, 7, 101).astype(np.uint8)
SPLIT = Split(IDS, ((0, 40), (40, 101)))
SUMS = "".join(f"{number}={number * 7}\n" for number in range(1000))
QUESTIONS = {"separator": "\\n", "answer_after": "="}


@pytest.mark.parametrize("batch_size", [1, 64])
def test_exact_loss(batch_size):
    """It is the mean over all targets, and draws no random numbers."""
    model, nats = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.5), 7), []
    for start, end in SPLIT.documents:
        for first in range(start, end - 1, 8):
            ids = torch.from_numpy(IDS[first : min(first + 9, end)]).long()
            logits = model.eval()(ids[None, :-1])[0]
            nats += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").tolist()
    assert len(nats) == 39 + 60
    state = torch.get_rng_state()
    loss = exact_loss(model.train(), evaluation_windows(SPLIT, 8, batch_size), CPU)
    assert loss == pytest.approx(np.mean(nats), abs=1e-6)
    assert torch.equal(torch.get_rng_state(), state)


def run_on(folder, content, **data):
    """Build a small run on a text."""
    (folder / "text.txt").write_text(content)
    settings = Config(
        DataConfig(sources=(str(folder / "text.txt"),), **data),
        ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, dropout=0.5),
    )
    return Run(settings, load_corpus(settings.data), CPU, World())


def test_evaluation_changes_nothing(tmp_path):
    run = run_on(tmp_path, SUMS, **QUESTIONS)  # an untrained model gets all wrong
    weights = bits(run.model.state_dict())
    progress, state = replace(run.progress), torch.get_rng_state()
    result = evaluate(run)
    texts, images = sample_texts(run, result), attention_images(run)
    assert math.isfinite(result.val_loss) and result.exact_match == 0
    assert list(texts) == ["samples/wrong_answers"] and len(images) == 1
    assert texts["samples/wrong_answers"].count("(right: ") == 3
    assert run.progress == progress and torch.equal(torch.get_rng_state(), state)
    assert bits(run.model.state_dict()) == weights


@pytest.mark.parametrize("max_val_chars", [0, 16, 500, 250_000])
def test_max_val(tmp_path, max_val_chars):
    """An evaluation predicts so many characters of the validation text, or all."""
    run = run_on(tmp_path, SUMS, max_val_chars=max_val_chars)
    result, every = evaluate(run), len(run.corpus.val) - 1
    assert every == math.ceil(len(SUMS) / 10) - 1
    predicted = int(result.val_losses.counts.sum())
    assert predicted == (496 if max_val_chars == 500 else min(max_val_chars or every, every))
    if max_val_chars == 500:  # spread over all that is held out
        assert (
            run.val_excerpt.documents[0][0] == 0 and run.val_excerpt.documents[-1][1] == every + 1
        )
        trained = sum(end - start - 1 for start, end in run.train_excerpt.documents)
        assert trained == 48  # a tenth, in whole windows


def test_max_val_of_a_list(tmp_path):
    """Whole items, and right answers of these."""
    run = run_on(tmp_path, SUMS, max_val_chars=200, **QUESTIONS)
    items, every = (set(map(tuple, split.documents)) for split in (run.val_excerpt, run.corpus.val))
    assert items < every
    result = evaluate(run)
    wrong = result.val_losses.wrong_documents
    assert max(wrong) < len(run.val_excerpt.documents) < 30
    assert result.exact_match == 1 - len(wrong) / len(run.val_excerpt.documents)
