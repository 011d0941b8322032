"""The best model is never lost: best.safetensors gets only weights that are at least as good."""

import math
import shutil

import pytest

from storage.checkpoint import BEST, LAST, load_checkpoint
from tests.runs import STEPS, at_step, bits, evaluations_give, step_of, stop_at, train
from training.state import Progress


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def best_loss(run):
    return load_checkpoint(run / BEST).progress.best_loss


def test_best_has_the_weights_alone(uninterrupted):
    best, last = (load_checkpoint(uninterrupted / name) for name in (BEST, LAST))
    weights = {name: t for name, t in last.tensors.items() if name.startswith("model.")}
    assert last.progress.best_step == STEPS and len(weights) < len(last.tensors)
    assert bits(best.tensors) == bits(weights)


def test_best_never_gets_worse(options, run, monkeypatch):
    """As when a finished run trains longer: the learning rate jumps up."""
    evaluations_give(monkeypatch, 2.0, 1.7, 1.8, 1.8)
    options = [*options, "--patience=3", f"--out_dir={run}"]
    assert train(*options)[0] == 0
    before = (run / BEST).read_bytes()
    assert step_of(run) == 24 and best_loss(run) == 1.7

    evaluations_give(monkeypatch, 1.9)
    stop_at(32, options[0], f"--out_dir={run}", "--resume", "--max_iters=48")
    assert (run / BEST).read_bytes() == before
    assert load_checkpoint(run / LAST).progress.best_loss == 1.7

    evaluations_give(monkeypatch, 1.85, 1.6, 1.65)
    assert train(options[0], f"--out_dir={run}", "--resume")[0] == 0
    assert step_of(run) == 48 and best_loss(run) == 1.6


@pytest.mark.parametrize(
    ("loss", "damaged", "kept"), [(1.8, False, True), (1.6, False, False), (1.8, True, False)]
)
def test_best_that_last_does_not_know(loss, damaged, kept, options, run, monkeypatch):
    """As after a kill between the two writes."""
    evaluations_give(monkeypatch, 2.0, 1.7)
    at_step(monkeypatch, 10, lambda: shutil.copyfile(run / LAST, run / "earlier"))
    stop_at(14, *options, f"--out_dir={run}")
    (run / "earlier").replace(run / LAST)
    before = (run / BEST).read_bytes()[: -1 if damaged else None]
    (run / BEST).write_bytes(before)
    assert load_checkpoint(run / LAST).progress.best_loss == 2.0

    evaluations_give(monkeypatch, loss, 3.0, 3.0)
    assert train(*options, f"--out_dir={run}", "--resume")[0] == 0
    assert load_checkpoint(run / LAST).progress.best_loss == loss  # as in an uninterrupted run
    assert ((run / BEST).read_bytes() == before) == kept
    assert best_loss(run) == (1.7 if kept else loss)


def test_best_is_read_once(train_run, monkeypatch):
    """At a resume, not at each improvement."""
    read = []
    evaluations_give(monkeypatch, 4.0, 3.0, 2.0, 1.0)
    noted = lambda path: read.append(path.name) or load_checkpoint(path)  # noqa: E731
    monkeypatch.setattr("storage.folder.load_checkpoint", noted)
    assert train_run("--max_iters=6")[0] == 0 and read == []
    output = train_run("--resume", f"--max_iters={STEPS}")[1]
    assert output.count("(best so far)") == 3 and read == [BEST]


def test_best_loss_of_zero():
    """It is lower than any other; NaN is never the best."""
    progress, losses = Progress(), [math.nan, 1.0, 0.0, 0.5, 0.0]
    improved = []
    for progress.step, loss in enumerate(losses, 1):
        progress.record_evaluation(loss)
        improved.append(progress.is_best)
    assert improved == [False, True, True, False, False]
    assert progress.best_loss == 0 and progress.evals_since_best == 2
