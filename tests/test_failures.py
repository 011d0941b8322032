"""Failures during a run: the message, the exit code and the remaining checkpoints."""

import errno
import math
import re
import shutil

import pytest
import torch

from common import files
from storage.checkpoint import BEST, LAST
from tests.runs import STEPS, at_step, contents, evaluations_give, scalars, step_of, train
from training import step
from training.optimizers import AdamW


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def last_line(output):
    assert output.count("error: ") == 1 and output.endswith("\n")
    return output.splitlines()[-1]


# ------------------------------------------------------------------------------- non-finite values


def test_a_non_finite_loss_ends_the_run_before_the_update_and_names_the_last_checkpoint(
    train_run, run, monkeypatch
):
    real, numbers = step.cross_entropy, iter(range(10**6))  # two losses a step

    def nan_in_step_6(*arguments):
        return real(*arguments) * (math.nan if next(numbers) == 11 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(step, "cross_entropy", nan_in_step_6)
        code, output = train_run()
    assert code == 6 and step_of(run) == 4
    assert re.fullmatch(
        r"error: after step 5, .* loss nan, gradient norm nan; both must be finite; the last "
        rf"checkpoint is {run}/last.safetensors; resume it with a lower learning rate",
        last_line(output),
    )
    assert train(run, "--muon_learning_rate=0.01")[0] == 0 and step_of(run) == STEPS


def test_a_non_finite_gradient_ends_the_run_before_the_update(train_run, run, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *words: clip(*words) * math.inf)
    code, output = train_run()
    assert code == 6 and step_of(run) == 0 and ", gradient norm inf; both must" in output


def test_weights_made_non_finite_by_an_update_are_not_saved(train_run, run, monkeypatch):
    update = AdamW.step

    def broken_update(self):
        update(self)
        self.groups[0][0][0].data[0] = math.inf

    monkeypatch.setattr(AdamW, "step", broken_update)
    code, output = train_run("--optimizer=adamw", "--save_interval=1")
    assert code == 6 and step_of(run) == 0
    assert "the weights or their moments are no longer finite; the last" in last_line(output)


def test_a_non_finite_validation_loss_is_reported_and_never_the_best(train_run, run, monkeypatch):
    evaluations_give(monkeypatch, math.nan, 3.0, math.nan, 2.0)
    code, output = train_run()
    assert code == 0 and "step 6: validation loss nan, " in output
    logged = [value for _, value in scalars(run)["val/loss"]]
    assert logged == pytest.approx([math.nan, 3.0, math.nan, 2.0], nan_ok=True)
    assert contents(run / BEST)["progress"]["best_step"] == STEPS


# --------------------------------------------------------------------------------------------- disk


def patch_disk_full(patch, is_full):
    """Raise ENOSPC where a file is written for which `is_full(name)`."""

    def opened(path, mode):
        if is_full(path.name.removesuffix(".tmp")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open(path, mode)

    patch.setattr(files, "open", opened, raising=False)


NOT_SAVED = (
    r"{run}/(\w+)\.safetensors: not saved \(No space left on device\); earlier files are intact"
)


def test_a_save_that_fails_on_a_full_disk_is_a_warning_and_the_next_save_retries(
    train_run, run, monkeypatch
):
    attempts = []

    def full_four_times(name):
        if name in (LAST, BEST):
            attempts.append(name)
        return name in (LAST, BEST) and len(attempts) <= 4

    evaluations_give(monkeypatch, 1.0, 2.0, 2.0, 2.0)
    patch_disk_full(monkeypatch, full_four_times)
    code, output = train_run()
    retries = "; training continues and retries at the next save"
    failed = re.findall(f"warning: {NOT_SAVED.format(run=run)}{retries}", output)
    assert code == 0 and failed == ["last", "last", "best", "best"]
    assert attempts[4:6] == [BEST, LAST] and attempts.count(BEST) == 3
    best = contents(run / BEST)["progress"]
    assert best["step"] == best["best_step"] == 6 and step_of(run) == STEPS


def test_if_the_final_save_fails_the_exit_code_is_5_and_the_old_checkpoint_is_intact(
    train_run, run, monkeypatch
):
    assert train_run("--max_iters=8")[0] == 0
    before = (run / LAST).read_bytes()
    with monkeypatch.context() as patch:
        patch_disk_full(patch, lambda name: name in (LAST, BEST))
        code, output = train_run("--resume", "--max_iters=12")
    assert code == 5 and (run / LAST).read_bytes() == before and not list(run.glob("*.tmp*"))
    assert re.fullmatch(f"error: {NOT_SAVED.format(run=run)}", last_line(output))
    assert train_run("--resume", "--max_iters=12")[0] == 0 and step_of(run) == 12


@pytest.mark.parametrize("action", ["moved", "deleted"])
def test_a_folder_that_is_moved_or_deleted_is_made_again_with_the_weights_from_then_on(
    action, train_run, run, tmp_path, monkeypatch
):
    def remove():
        run.rename(tmp_path / "moved") if action == "moved" else shutil.rmtree(run)

    at_step(monkeypatch, 9, remove)
    evaluations_give(monkeypatch, 1.0, 2.0, 1.9, 1.8)  # the best weights are gone with the folder
    code, output = train_run()
    assert code == 0 and output.count("warning: ") == 1
    warning = f"warning: {run} was moved or deleted, and is made again; the earlier files are where"
    assert warning in output
    assert step_of(run) == STEPS and "max_iters: 24" in (run / "config.yaml").read_text()
    best = contents(run / BEST)["progress"]
    assert (best["step"], best["best_loss"]) == (STEPS, 1.8)
    assert (run / "metrics.csv").read_text().splitlines()[-1].startswith("24,")
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(13, STEPS + 1))
    assert (tmp_path / "moved" / LAST).exists() == (action == "moved")
