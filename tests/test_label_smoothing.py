"""Label smoothing with an n-gram model of the training text: gradients, losses and limits."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from checkpointing import checkpoint
from common.errors import ConfigError
from configs.cli import load
from configs.schema import NGRAM_LABEL_ORDER
from data.batches import IGNORED
from data.corpus import load_corpus
from model.gpt import GPT
from model.ngram_model import NgramModel
from tests.campaigns.common import at_step, same_runs, small_run_args, train
from tests.conftest import ROOT
from training import state
from training.runtime import select_runtime
from training.state import Run
from training.step import TrainStep

WEIGHT = 0.3


def run_of(folder, lengths=(3000,), **settings):
    """A run on files of these lengths, cut from one play, in float32."""
    play = (ROOT / "data" / "plays" / "admiral.txt").read_text(encoding="utf-8")
    for i, length in enumerate(lengths):
        (folder / f"{i}.txt").write_text(play[:length], encoding="utf-8")
    options = {"n_embd": 16, "n_head": 2, "n_layer": 1, "block_size": 32, "batch_size": 3}
    words = [f"--{name}={value}" for name, value in (options | settings).items()]
    command = load([str(ROOT / "configs/smoke.yaml"), "--dtype=float32", *words])
    corpus = load_corpus([str(folder)], notify=print)
    model = GPT(command.config.model, len(corpus.tokenizer), seed=0)
    return Run(model, command.config, corpus, select_runtime("cpu", "float32"))


def gradients(run, monkeypatch):
    """The gradients of the run's first step, before clipping, and the loss that it returns."""
    step, seen = TrainStep(run, notify=print), {}

    def record(finite):
        for name, parameter in run.model.named_parameters():
            seen[name] = parameter.grad.clone()
            parameter.grad = None
        return False

    monkeypatch.setattr(step, "_update", record)
    return seen, step().loss


# In the second case, the windows of the short files are padded.
@pytest.mark.parametrize("lengths", [(3000,), (3000, 20, 25, 30)])
def test_the_gradients_are_those_of_the_mixed_targets(lengths, tmp_path, monkeypatch):
    options = {"grad_clip": 0, "batch_size": 45, "gradient_accumulation_steps": 2}
    run = run_of(tmp_path, lengths, ngram_label_smoothing=WEIGHT, **options)
    found, loss = gradients(run, monkeypatch)
    x, y = map(np.concatenate, zip(run.batches(0), run.batches(1), strict=True))
    assert (y == IGNORED).any() == (len(lengths) > 1)
    ngrams = NgramModel(run.corpus.train.text(), NGRAM_LABEL_ORDER, run.model.vocab_size)
    ngram_probs = torch.from_numpy(ngrams.probs(x, 32))
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    counted = y != IGNORED
    labels = F.one_hot(y.clamp(min=0), run.model.vocab_size)
    targets = (1 - WEIGHT) * labels + WEIGHT * ngram_probs
    logits = run.model(x)
    assert loss == pytest.approx(F.cross_entropy(logits[counted], y[counted]).item(), abs=1e-5)
    F.cross_entropy(logits[counted], targets[counted]).backward()
    for name, parameter in run.model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-6), name


def test_without_smoothing_nothing_is_counted(tmp_path):
    assert run_of(tmp_path).label_ngram_model is None


def test_a_text_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "MAX_NGRAM_TEXT", 2000)
    with pytest.raises(ConfigError, match=r"^(train\.ngram_label_smoothing): .* set \1 to 0$"):
        run_of(tmp_path, ngram_label_smoothing=0.1)


def test_the_labels_have_an_ngram_model_of_their_own(tmp_path):
    run = run_of(tmp_path, ngram_label_smoothing=0.1, ngram_model=6)
    assert (run.ngram_model.order, run.label_ngram_model.order) == (6, NGRAM_LABEL_ORDER)


def test_a_resumed_run_is_the_run_that_never_stopped_and_saves_no_text(tmp_path, monkeypatch):
    options = [*small_run_args(tmp_path), "--ngram_label_smoothing=0.3"]
    runs = [tmp_path / name for name in ("whole", "resumed", "plain")]
    assert train(*options, f"--out_dir={runs[0]}")[0] == 0
    assert train(*options[:-1], f"--out_dir={runs[2]}")[0] == 0
    with monkeypatch.context() as patch:
        at_step(patch, 13, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        assert train(*options, f"--out_dir={runs[1]}")[0] == 130
    assert train(*options, f"--out_dir={runs[1]}", "--resume")[0] == 0
    assert same_runs(runs[0], runs[1]) and not same_runs(runs[0], runs[2])
    assert checkpoint.NGRAM_TEXT not in checkpoint.load(runs[0] / "last.safetensors").tensors
