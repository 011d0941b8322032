"""Failures during a run: the message, the exit code and the remaining checkpoints."""

import errno
import itertools
import math
import re
import shutil

import pytest
import torch

from storage.checkpoint import BEST, LAST, load_checkpoint
from tests.runs import STEPS, at_step, evaluations_give, step_of, train

NOT_FINITE = [  # a function of a step, what it returns, words of the error
    ("torch.nn.utils.clip_grad_norm_", torch.tensor(math.inf), "gradient norm inf"),
    ("train.lr_multiplier", math.inf, "the weights or their moments are no longer finite"),
]


@pytest.mark.parametrize(("function", "value", "words"), NOT_FINITE)
def test_not_finite(function, value, words, train_run, run, monkeypatch):
    """A run that diverges ends before it replaces its last checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(function, lambda *_: value)
        patch.setattr("storage.folder.SAVE_SECONDS", 0)
        code, output = train_run()
    assert code == 2 and step_of(run) == 0
    line = f"error: after step .*{words}.*; the last checkpoint is in {run}; resume it with .*"
    assert re.fullmatch(line, output.splitlines()[-1])
    assert train(run, "--max_iters=2")[0] == 0 and step_of(run) == 2


# --------------------------------------------------------------------------------------------- disk


def disk_is_full(patch, answers):
    """Raise ENOSPC where a checkpoint is written, as long as the next answer is True."""

    def opened(path, mode):
        if path.name.removesuffix(".tmp") in (LAST, BEST) and next(answers, False):
            raise OSError(errno.ENOSPC, "disk full")
        return open(path, mode)

    patch.setattr("common.files.open", opened, raising=False)


NOT_SAVED = r"{run}/(\w+)\.safetensors: not saved \(disk full\); earlier files are intact"


def test_full_disk_is_a_warning(train_run, run, monkeypatch):
    """The next save tries again, also to write weights that are not the newest."""
    evaluations_give(monkeypatch, 1.0, 2.0, 2.0, 2.0)
    disk_is_full(monkeypatch, iter([True, True]))
    code, output = train_run()
    retries = "; training continues and retries at the next save"
    assert code == 0
    assert re.findall(f"warning: {NOT_SAVED.format(run=run)}{retries}", output) == ["last", "best"]
    assert load_checkpoint(run / BEST).progress.step == 6 and step_of(run) == STEPS


def test_full_disk_at_the_end_is_an_error(train_run, run, monkeypatch):
    """And at the start of a run that replaces another; the old checkpoints are intact."""
    assert train_run("--max_iters=8")[0] == 0
    before = [(run / name).read_bytes() for name in (LAST, BEST)]
    for words in (["--overwrite"], ["--resume", "--max_iters=12"]):
        with monkeypatch.context() as patch:
            disk_is_full(patch, itertools.repeat(True))
            code, output = train_run(*words)
        assert code == 2
        assert re.fullmatch(f"error: {NOT_SAVED.format(run=run)}", output.splitlines()[-1])
        assert [(run / name).read_bytes() for name in (LAST, BEST)] == before
    assert train_run(*words)[0] == 0 and step_of(run) == 12


def test_folder_that_is_deleted(train_run, run, monkeypatch):
    at_step(monkeypatch, 3, lambda: shutil.rmtree(run))
    assert train_run("--max_iters=6")[0] == 0 and step_of(run) == 6
