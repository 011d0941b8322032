"""The best model is never lost: best.safetensors gets only weights that are at least as good."""

import math

import pytest

from storage.checkpoint import BEST, LAST, load_checkpoint
from tests.runs import STEPS, bits, evaluations_give, step_of, train, train_and_copy


def best_loss(path):
    return load_checkpoint(path).progress.best_loss


def test_best_has_the_weights_alone(uninterrupted):
    best, last = (load_checkpoint(uninterrupted / name) for name in (BEST, LAST))
    weights = {name: t for name, t in last.tensors.items() if name.startswith("model.")}
    assert last.progress.best_step == STEPS and len(weights) < len(last.tensors)
    assert bits(best.tensors) == bits(weights)


def test_best_never_gets_worse(train_run, run, monkeypatch):
    """NaN is never the best. When a finished run trains longer, the learning rate jumps up."""
    evaluations_give(monkeypatch, math.nan, 1.7, 1.8, 1.8)
    assert train_run("--patience=3")[0] == 0
    before = (run / BEST).read_bytes()
    assert step_of(run) == 24 and best_loss(run / BEST) == 1.7
    evaluations_give(monkeypatch, 1.9, 1.8, 1.75)
    assert train(run, "--max_iters=48")[0] == 0 and step_of(run) == 42
    assert (run / BEST).read_bytes() == before and best_loss(run / LAST) == 1.7


@pytest.mark.parametrize(
    ("loss", "damaged", "kept"), [(1.8, False, True), (1.6, False, False), (1.8, True, False)]
)
def test_best_that_last_does_not_know(loss, damaged, kept, options, run, monkeypatch):
    """As after a kill between the two writes."""
    evaluations_give(monkeypatch, 2.0, 1.7, 1.8, 1.8)
    killed = train_and_copy(run, 10, *options)
    best = (run / BEST).read_bytes()[: -1 if damaged else None]
    (killed / BEST).write_bytes(best)
    evaluations_give(monkeypatch, loss, 3.0, 3.0)
    assert train(killed)[0] == 0
    assert best_loss(killed / LAST) == loss  # as in an uninterrupted run
    assert ((killed / BEST).read_bytes() == best) == kept
    assert best_loss(killed / BEST) == (1.7 if kept else loss)
