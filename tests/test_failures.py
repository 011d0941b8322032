"""Failures during a run: the message, the exit code and the remaining checkpoints."""

import errno
import math
import re
import shutil

import pytest
import torch

import train as train_script
from common import files
from storage import folder
from storage.checkpoint import BEST, LAST, load_checkpoint
from tests.runs import STEPS, at_step, evaluations_give, scalars, snapshot, step_of, train
from training.optimizers import AdamW


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def nan_loss(patch):
    real, numbers = train_script.cross_entropy, iter(range(10**6))  # two losses a step
    nan = lambda *words: real(*words) * (math.nan if next(numbers) == 17 else 1)  # noqa: E731
    patch.setattr(train_script, "cross_entropy", nan)


def infinite_gradient(patch):
    clip = torch.nn.utils.clip_grad_norm_
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *words: clip(*words) * math.inf)


def infinite_weight(patch):
    update = AdamW.step

    def broken_update(self):
        update(self)
        self.groups[0][0][0].data[0] = math.inf

    patch.setattr(AdamW, "step", broken_update)
    patch.setattr(folder, "SAVE_SECONDS", 0)


NOT_FINITE = {  # what breaks, in which step: the step of the last checkpoint, words of the error
    nan_loss: (6, "after step 8, .* loss nan, gradient norm nan; both must be finite"),
    infinite_gradient: (0, "after step 0, .*, gradient norm inf; both must be finite"),
    infinite_weight: (0, "after step 1, .* the weights or their moments are no longer finite"),
}


@pytest.mark.parametrize("break_run", NOT_FINITE, ids=lambda function: function.__name__)
def test_not_finite(break_run, train_run, run, monkeypatch):
    """A run that diverges ends before it replaces its last checkpoint."""
    saved, words = NOT_FINITE[break_run]
    with monkeypatch.context() as patch:
        break_run(patch)
        code, output = train_run()
    assert code == 2 and step_of(run) == saved
    line = f"error: {words}; the last checkpoint is in {run}; resume it with a lower learning rate"
    assert re.fullmatch(line, output.splitlines()[-1])
    assert train(run, "--muon_learning_rate=0.01")[0] == 0 and step_of(run) == STEPS


def test_not_finite_validation_loss(train_run, run, monkeypatch):
    """It is reported, and never the best."""
    evaluations_give(monkeypatch, math.nan, 3.0, math.nan, 2.0)
    code, output = train_run()
    assert code == 0 and "step 6: validation loss nan, " in output
    logged = [value for _, value in scalars(run)["val/loss"]]
    assert logged == pytest.approx([math.nan, 3.0, math.nan, 2.0], nan_ok=True)
    assert load_checkpoint(run / BEST).progress.best_step == STEPS


# --------------------------------------------------------------------------------------------- disk


def disk_is_full(patch, is_full):
    """Raise ENOSPC where a file is written for which `is_full(name)`."""

    def opened(path, mode):
        if is_full(path.name.removesuffix(".tmp")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open(path, mode)

    patch.setattr(files, "open", opened, raising=False)


NOT_SAVED = (
    r"{run}/(\w+)\.safetensors: not saved \(No space left on device\); earlier files are intact"
)


def test_full_disk_is_a_warning(train_run, run, monkeypatch):
    """The next save tries again."""
    attempts = []

    def full_four_times(name):
        if name in (LAST, BEST):
            attempts.append(name)
        return name in (LAST, BEST) and len(attempts) <= 4

    evaluations_give(monkeypatch, 1.0, 2.0, 2.0, 2.0)
    disk_is_full(monkeypatch, full_four_times)
    code, output = train_run()
    retries = "; training continues and retries at the next save"
    failed = re.findall(f"warning: {NOT_SAVED.format(run=run)}{retries}", output)
    assert code == 0 and failed == ["last", "best", "best", "best"]
    assert attempts[4:6] == [BEST, LAST] and attempts.count(BEST) == 4
    best = load_checkpoint(run / BEST).progress
    assert best.step == best.best_step == 6 and step_of(run) == STEPS


def test_full_disk_at_the_end_is_an_error(train_run, run, monkeypatch):
    """The old checkpoint is intact."""
    assert train_run("--max_iters=8")[0] == 0
    before = (run / LAST).read_bytes()
    with monkeypatch.context() as patch:
        disk_is_full(patch, lambda name: name in (LAST, BEST))
        code, output = train_run("--resume", "--max_iters=12")
    assert code == 2 and (run / LAST).read_bytes() == before and not list(run.glob("*.tmp*"))
    assert re.fullmatch(f"error: {NOT_SAVED.format(run=run)}", output.splitlines()[-1])
    assert train_run("--resume", "--max_iters=12")[0] == 0 and step_of(run) == 12


def test_folder_that_is_deleted(train_run, run, monkeypatch):
    at_step(monkeypatch, 9, lambda: shutil.rmtree(run))
    evaluations_give(monkeypatch, 1.0, 2.0, 1.9, 1.8)
    assert train_run()[0] == 0 and step_of(run) == STEPS


def test_full_disk_keeps_an_overwritten_run(train_run, run, monkeypatch):
    assert train_run()[0] == 0
    before = snapshot(run)
    disk_is_full(monkeypatch, lambda name: name == LAST)
    code, output = train_run("--overwrite", "--max_iters=3")
    assert code == 2 and re.search(NOT_SAVED.format(run=run), output)
    assert snapshot(run) == before
