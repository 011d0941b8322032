"""Several ranks: the losses of a single process, output and files from rank 0 only, joint stops."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from common.console import ConfigError, ResourceError
from tests.runs import (
    before_call,
    losses,
    same_runs,
    small_run_args,
    snapshot,
    start,
    step_of,
    train,
)
from tests.slow.ranks import train_ranks
from training.distributed import TORCHRUN_VARIABLES, World
from training.state import Run

STEPS = 100
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The options of a run, its folder after two ranks have trained it, and the output of each."""
    folder = tmp_path_factory.mktemp("two_ranks")
    options = [*small_run_args(folder), "--dropout=0", f"--max_iters={STEPS}"]
    return options, folder / "run", train_ranks(folder, *options, f"--out_dir={folder / 'run'}")


def test_rank_variables_incomplete(monkeypatch):
    """Another job has left them: it is a plain run, which prints and saves."""
    monkeypatch.setenv("RANK", "1")
    assert World().is_main and World().size == 1


def test_ranks_that_cannot_share(monkeypatch):
    """GPUs or a batch: each rank refuses, before it connects."""
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "4")
    monkeypatch.setattr("training.distributed.discard_output", lambda: None)
    monkeypatch.setattr("torch.distributed.init_process_group", pytest.fail)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    world = World()
    with pytest.raises(ResourceError, match=r"mps is one GPU, .* --device=cpu"):
        world.connect(torch.device("mps"))
    with pytest.raises(ResourceError, match="4 processes, but 1 GPUs; --nproc_per_node=1, or"):
        world.connect(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"batch_size 3 .* a multiple of the 4 processes"):
        world.rows(3)


def test_ranks_equal_one_process(two_ranks, tmp_path):
    """To 1e-5 in float32: sums have another order. A loss that rank 1 logs would be one more."""
    options, run, _ = two_ranks
    assert train(*options, f"--out_dir={tmp_path}")[0] == 0
    assert losses(run) == pytest.approx(losses(tmp_path), abs=1e-5)


def test_rank_0_alone_prints(two_ranks):
    *_, (printed, other) = two_ranks
    assert printed.count(f"step {STEPS}:") == 1 and ", 2 processes\n" in printed and other == ""


def share_no_folder() -> None:
    """Find no run, as on a machine that does not share its folder."""
    pytest.MonkeyPatch().setattr("configs.command.holds_run", lambda _: False)


def test_ranks_at_different_steps(two_ranks):
    """Each says its own, and the run stays as it is."""
    options, run, _ = two_ranks
    before, words = snapshot(run), [*options, f"--out_dir={run}", "--resume"]
    outputs = train_ranks(run.parent, *words, on_rank_1=share_no_folder, code=2)
    for step, output in zip((STEPS, 0), outputs, strict=True):
        assert f"error: this process begins at step {step} of text " in output
        assert output.count("\n") == 1
    assert snapshot(run) == before


def stop_in_step_5() -> None:
    """Let a signal come when this rank has just told the others that it goes on to step 5."""
    stop = partial(signal.raise_signal, signal.SIGTERM)
    before_call(pytest.MonkeyPatch(), "torch.distributed.all_reduce", 10, stop)


def lose_patience() -> None:
    """Lose it at step 7, as if the losses of this rank were rounded otherwise."""
    Run.out_of_patience = property(lambda run: run.progress.step == 7)


def test_ranks_stop_together(two_ranks, tmp_path):
    """What stops one stops all at the same step; the run is resumed bit-exactly."""
    options, whole, _ = two_ranks
    run = tmp_path / "run"
    words = [*options, f"--out_dir={run}"]
    printed, _ = train_ranks(tmp_path, *words, on_rank_1=stop_in_step_5, code=143)
    assert step_of(run) == 5
    assert f"to resume:\n  start this with the same torchrun: train.py {run}\n" in printed
    train_ranks(tmp_path, run, on_rank_1=lose_patience)
    assert step_of(run) == 7
    train_ranks(tmp_path, run)
    assert same_runs(whole, run)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_rank_that_is_killed(two_ranks, tmp_path):
    """torchrun starts all again, and the run is resumed bit-exactly."""
    options, whole, _ = two_ranks
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1"]
    words = [*options, f"--out_dir={tmp_path / 'run'}", "--resume"]
    process = start(*torchrun, "train.py", *words)
    next(line for line in process.stdout if line.startswith("step "))
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[0]), signal.SIGKILL)
    assert "resuming" in process.communicate(timeout=100)[0]
    assert process.returncode == 0 and same_runs(whole, tmp_path / "run")
