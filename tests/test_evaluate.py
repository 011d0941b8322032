"""Evaluation: the exact loss has every target once, for any batch size; nothing else changes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.stop import Interrupted, Stop
from configs.schema import Config, DataConfig, ModelConfig
from data.batches import Split, evaluation_windows
from data.corpus import load_corpus
from model.gpt import GPT
from storage.log import attention_images
from tests.runs import equal
from training.device import select_runtime
from training.distributed import World
from training.evaluate import evaluate, exact_loss
from training.samples import write_texts
from training.state import Run

CPU = select_runtime("cpu", "float32")
IDS = np.random.default_rng(0).integers(0, 7, 101).astype(np.uint8)
SPLIT = Split(IDS, ((0, 40), (40, 101)))


@pytest.mark.parametrize("batch_size", [1, 64])
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


@pytest.fixture
def run(tmp_path):
    """A run on questions, which an untrained model all gets wrong."""
    (tmp_path / "sums.txt").write_text("".join(f"{n}+1={n + 1}\n" for n in range(90)))
    data = DataConfig((str(tmp_path / "sums.txt"),), separator="\\n", answer_after="=")
    model = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.5)
    return Run(Config(data=data, model=model), load_corpus(data), CPU, World())


def test_an_evaluation_changes_nothing_in_the_run(run):
    weights = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    progress, state = replace(run.progress), torch.get_rng_state()
    result = evaluate(run, Stop())
    texts, images = write_texts(run, result), attention_images(run)
    assert math.isfinite(result.val_loss) and result.exact_match == 0
    assert list(texts) == ["samples/wrong_answers"] and len(images) == 1
    assert texts["samples/wrong_answers"].count("(right: ") == 3
    assert run.progress == progress and torch.equal(torch.get_rng_state(), state)
    assert equal(dict(run.model.state_dict()), weights)


def test_a_stop_interrupts_an_evaluation_but_not_what_is_drawn_of_it(run):
    stop, result = Stop(), evaluate(run, Stop())
    stop.exit_code = 130
    with pytest.raises(Interrupted):
        evaluate(run, stop)
    assert write_texts(run, result)["samples/wrong_answers"]
