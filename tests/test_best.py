"""The best model is never lost: best.safetensors gets only weights that are at least as good."""

import shutil

import pytest

from storage.checkpoint import BEST, LAST, load_checkpoint
from tests.runs import STEPS, at_step, contents, equal, evaluations_give, step_of, stop_at, train


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def best_loss(run):
    return load_checkpoint(run / BEST).progress.best_loss


def test_best_safetensors_has_the_weights_without_the_state_of_the_optimizers(uninterrupted):
    best, last = (contents(uninterrupted / name) for name in (BEST, LAST))
    weights = {name: t for name, t in last["tensors"].items() if name.startswith("model.")}
    assert last["progress"]["best_step"] == STEPS and len(weights) < len(last["tensors"])
    assert equal(best["tensors"], weights)


# ------------------------------------------------------------------------- a run that trains longer


def test_a_finished_run_that_trains_longer_never_replaces_the_best_by_a_worse_one(
    options, run, monkeypatch
):
    """The learning rate jumps up."""
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


# --------------------------------------------------------------------- progress older than best


@pytest.mark.parametrize(
    ("loss", "damaged", "kept"), [(1.8, False, True), (1.6, False, False), (1.8, True, False)]
)
def test_the_best_loss_so_far_is_the_one_in_the_file_of_the_best_weights(
    loss, damaged, kept, options, run, monkeypatch
):
    """As after a kill between the two writes: `last` does not know the best weights yet."""
    evaluations_give(monkeypatch, 2.0, 1.7)
    at_step(monkeypatch, 10, lambda: shutil.copyfile(run / LAST, run / "earlier"))
    stop_at(14, *options, "--save_interval=10", f"--out_dir={run}")
    (run / "earlier").replace(run / LAST)
    before = (run / BEST).read_bytes()[: -1 if damaged else None]
    (run / BEST).write_bytes(before)
    assert load_checkpoint(run / LAST).progress.best_loss == 2.0

    evaluations_give(monkeypatch, loss, 3.0, 3.0)
    code, output = train(*options, f"--out_dir={run}", "--resume")
    assert code == 0
    assert ("; the next best weights replace it\n" in output) == damaged
    assert load_checkpoint(run / LAST).progress.best_loss == loss  # as in an uninterrupted run
    assert ((run / BEST).read_bytes() == before) == kept
    assert best_loss(run) == (1.7 if kept else loss)
