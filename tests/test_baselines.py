"""The baselines: each kind of loss against a plain computation, and the whole command."""

import math
import zlib

import numpy as np
import pytest
import torch

from benchmarks import baselines
from configs.schema import ModelConfig
from data.batches import Split, evaluation_windows
from model.gpt import GPT
from model.ngram_model import NgramModel
from model.runtime import select_runtime
from tests.runs import small_run_args, train
from training.evaluate import exact_loss

V = 7


def random_ids(length):
    return np.random.default_rng(length).integers(0, V, length).astype(np.uint8)


def random_model(block_size=8):
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=block_size), V)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    return model.eval()


def logs_of(model, context):
    """The log-probabilities of what follows a context."""
    with torch.no_grad():
        return model(torch.from_numpy(context[None].astype(np.int64)))[0, -1].log_softmax(-1)


@pytest.mark.parametrize("length, block_size", [(2, 8), (9, 8), (10, 8), (40, 8), (40, 7), (9, 1)])
def test_overlapping_windows_predict_each_character_once_from_at_least_half_a_window(
    length, block_size
):
    model, ids, nats = random_model(block_size), random_ids(length), 0.0
    hop = max(1, block_size // 2)
    for target in range(1, length):
        # the first window that ends with the target or later
        start = max(0, math.ceil((target - block_size) / hop) * hop)
        assert start == 0 or target - start >= block_size / 2
        nats -= logs_of(model, ids[start:target])[ids[target]].item()
    found = baselines.overlapping_loss(model, ids)
    assert found == pytest.approx(nats / (length - 1), abs=1e-5)


def test_dynamic_evaluation_scores_each_window_before_it_learns_from_it():
    ids = np.tile(random_ids(9), 12)
    windows = list(evaluation_windows(Split(ids, ((0, len(ids)),)), 8, 1))
    fixed = exact_loss(random_model(), windows, select_runtime("cpu", "float32"))
    assert baselines.dynamic_loss(random_model(), ids, 0.0) == pytest.approx(fixed, abs=1e-5)
    assert baselines.dynamic_loss(random_model(), ids, 0.1) < fixed - 0.1
    first = ids[:9]  # one window: nothing is learned before it
    alone = baselines.dynamic_loss(random_model(), first, 0.0)
    assert baselines.dynamic_loss(random_model(), first, 0.1) == pytest.approx(alone, abs=1e-6)


def test_ngram_loss_is_that_of_the_whole_text_at_once(monkeypatch):
    model, ids = NgramModel(random_ids(300), 4, V), random_ids(90)
    probs = model.probs(ids[None, :-1], 89)[0]
    expected = -np.log(probs[np.arange(89), ids[1:]]).mean()
    for piece in (1, 2, 13, 1000):
        monkeypatch.setattr(baselines, "CHUNK", piece)
        assert baselines.ngram_loss(model, ids) == pytest.approx(expected, abs=1e-6)


def test_compressed_loss_is_what_the_second_text_adds():
    train_text, val_text = b"to be or not to be " * 50, "größe ".encode() * 20

    def size(text):
        return len(zlib.compress(text))

    nats = baselines.compressed_loss(size, train_text, val_text)
    added = size(train_text + val_text) - size(train_text)
    assert nats == pytest.approx(added * 8 * math.log(2) / 120) and 0 < nats < 1


def test_the_command_prints_a_table_for_each_class(tmp_path, capsys):
    for seed in (1, 2):
        options = [f"--seed={seed}", f"--out_dir={tmp_path}/{seed}"]
        assert train(*small_run_args(tmp_path), *options)[0] == 0
    runs = [f"{tmp_path}/1", f"{tmp_path}/2"]
    capsys.readouterr()
    baselines.main([*runs, "--mixture", *runs, f"--text={tmp_path}/text.txt"])
    tables = {}
    for table in capsys.readouterr().out.split("\n\n"):
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"]
        tables[rows[0][0] if rows else ""] = dict(rows[2:])
    both = f"mixture of {', '.join(runs)}"
    fixed, overlapping = tables["fixed models"], tables["overlapping windows"]
    losses = [float(fixed[f"modified Kneser-Ney, order {n}"]) for n in range(1, 9)]
    assert losses[0] > losses[1] > losses[2]
    rows = [row for name in (*runs, both) for row in (name, f"{name}, with n-grams")]
    assert list(fixed)[8:] == list(overlapping) == rows
    assert float(fixed[both]) < max(float(fixed[run]) for run in runs)
    assert float(fixed[f"{both}, with n-grams"]) < float(fixed[both]) - 0.1
    adaptive = tables["adaptive models"]
    for run in runs:
        assert float(adaptive[f"{run}, dynamic evaluation"]) < float(fixed[run]) + 0.1
    other = tmp_path / "other.txt"
    other.write_text((tmp_path / "text.txt").read_text() + "the end")
    with pytest.raises(SystemExit, match="was not trained on the first nine tenths"):
        baselines.main([*runs, f"--text={other}"])
