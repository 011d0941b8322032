"""The best model is never lost: best.safetensors only gets weights that are at least as good, and
a run that is killed loses little.
"""

from types import SimpleNamespace

import pytest

from storage import folder as folders
from storage.checkpoint import BEST, LAST, PREV, load
from storage.folder import BEST_BEFORE
from tests.runs import (
    STEPS,
    at_step,
    contents,
    equal,
    evaluations_give,
    snapshot,
    step_of,
    stop_at,
    train,
    write_checkpoint,
)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def best_loss(run):
    return load(run / BEST).progress.best_loss


def test_best_has_the_weights_alone(uninterrupted):
    best, last = (contents(uninterrupted / name) for name in (BEST, LAST))
    weights = {name: t for name, t in last["tensors"].items() if name.startswith("model.")}
    assert last["progress"]["best_step"] == STEPS and len(weights) < len(last["tensors"])
    assert equal(best["tensors"], weights)


# ------------------------------------------------------------------------- a run that trains longer


def test_a_finished_run_that_trains_longer_never_replaces_the_best_by_a_worse_one(
    options, run, tmp_path, monkeypatch
):
    """With more epochs `logit_scale: auto` is another number, and the learning rate jumps up."""
    text = tmp_path / "text.txt"
    text.write_text(text.read_text()[:1500])
    evaluations_give(monkeypatch, 2.0, 1.7, 1.8, 1.8)
    options = [*options, "--logit_scale=auto", "--patience=3", f"--out_dir={run}"]
    assert train(*options)[0] == 0
    before = (run / BEST).read_bytes()
    assert step_of(run) == 24 and best_loss(run) == 1.7

    evaluations_give(monkeypatch, 1.9)
    output = stop_at(32, options[0], f"--out_dir={run}", "--resume", "--max_iters=48")
    assert "\nmodel.logit_scale 0.93 -> 0.87\n" in output
    assert (run / BEST).read_bytes() == before and load(run / LAST).progress.best_loss == 1.7

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
    """As after a kill between the two writes, or with `prev` in place of a damaged `last`."""
    evaluations_give(monkeypatch, 2.0, 1.7)
    stop_at(14, *options, "--save_interval=10", f"--out_dir={run}")
    (run / LAST).write_bytes(b"")
    before = (run / BEST).read_bytes()[: -1 if damaged else None]
    (run / BEST).write_bytes(before)
    assert load(run / PREV).progress.best_loss == 2.0

    evaluations_give(monkeypatch, loss, 3.0, 3.0)
    assert train(*options, f"--out_dir={run}", "--resume")[0] == 0
    assert load(run / LAST).progress.best_loss == loss  # as in an uninterrupted run
    assert ((run / BEST).read_bytes() == before) == kept
    assert best_loss(run) == (1.7 if kept else loss)


# ------------------------------------------------------------------------ another validation text


@pytest.fixture
def with_val(options, run, tmp_path):
    """The options of the small run with a validation text, after a run of 12 steps."""
    (tmp_path / "val.txt").write_text((tmp_path / "text.txt").read_text()[:600])
    words = [*options, f"--val_sources={tmp_path / 'val.txt'}", f"--out_dir={run}"]
    assert train(*words, "--max_iters=12")[0] == 0
    return words


def change(path):
    path.write_text(path.read_text()[::-1])


RESUME = ["--resume", "--allow_data_change", "--max_iters=24"]


def test_a_best_of_another_validation_text_is_kept_beside_before_the_first_save(
    with_val, run, tmp_path, monkeypatch
):
    before = (run / BEST).read_bytes()
    change(tmp_path / "val.txt")
    seen = {}
    with monkeypatch.context() as patch:
        at_step(patch, 12, lambda: seen.update(snapshot(run)))
        evaluations_give(patch, 9.0, 8.0, 8.5)  # at step 12 too: that is another loss now
        code, output = train(*with_val, *RESUME)
    assert code == 0 and seen[BEST_BEFORE][1] == before
    line = f"the validation text has changed: {run / BEST_BEFORE} keeps the best weights so far\n"
    assert output.count(line) == 1
    progress = load(run / LAST).progress
    assert (progress.best_loss, progress.best_step) == (8.0, 18) and best_loss(run) == 8.0

    second = (run / BEST).read_bytes()
    change(tmp_path / "val.txt")
    output = train(*with_val, *RESUME, "--max_iters=25")[1]
    assert " so far; an earlier one is replaced\n" in output
    assert (run / BEST_BEFORE).read_bytes() == second


def test_after_a_kill_the_best_of_the_new_text_is_not_taken_for_that_of_the_old(
    with_val, run, tmp_path
):
    """A kill before `last` is saved: it still has the old text, and `best` has the new one."""
    before = {name: (run / name).read_bytes() for name in (BEST, LAST)}
    change(tmp_path / "val.txt")
    assert train(*with_val, *RESUME)[0] == 0
    after = (run / BEST).read_bytes()
    (run / LAST).write_bytes(before[LAST])
    assert train(*with_val, *RESUME)[0] == 0
    assert (run / BEST_BEFORE).read_bytes() == before[BEST] and (run / BEST).read_bytes() == after


def test_another_training_text_beside_the_same_validation_text_forgets_nothing(
    with_val, run, tmp_path
):
    forged = contents(run / LAST)
    forged["progress"]["best_loss"] = 0.5
    write_checkpoint(run / LAST, forged)
    before = (run / BEST).read_bytes()
    change(tmp_path / "text.txt")
    assert train(*with_val, *RESUME)[0] == 0
    assert (run / BEST).read_bytes() == before and not (run / BEST_BEFORE).exists()
    assert load(run / LAST).progress.best_loss == 0.5


# ---------------------------------------------------------------------------------- save_interval


@pytest.mark.parametrize(
    ("step_seconds", "save_seconds", "expected"),
    [
        (10, 0, [*range(0, 21, 2), 23, 24]),  # 15 s at first; after 150 s, a tenth
        (1000, 0, [*range(25)]),  # never more than five minutes
        (10, 1, [0, 5, 10, 15, 20, 24]),  # 50 times what a save takes
    ],
)
def test_an_automatic_save_comes_after_a_tenth_of_the_time_so_far(
    step_seconds, save_seconds, expected, options, run, monkeypatch
):
    saved, clock = set(), SimpleNamespace(now=0.0)
    monkeypatch.setattr(folders, "time", SimpleNamespace(monotonic=lambda: clock.now))
    to_bytes = folders.checkpoints.to_bytes

    def slow_to_bytes(checkpoint):
        saved.add(checkpoint.progress.step)
        clock.now += save_seconds
        return to_bytes(checkpoint)

    monkeypatch.setattr(folders.checkpoints, "to_bytes", slow_to_bytes)
    for step in range(STEPS):
        at_step(monkeypatch, step, lambda: setattr(clock, "now", clock.now + step_seconds))
    assert train(*options, f"--out_dir={run}", "--save_interval=auto", "--eval_interval=99")[0] == 0
    assert sorted(saved) == expected
