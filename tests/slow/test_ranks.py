"""Several ranks: the losses of a single process, output and files from rank 0 only, joint stops."""

import os
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from common.console import ConfigError, ResourceError
from data.corpus import load_corpus
from tests.runs import (
    STEPS,
    before_call,
    count_checkpoints,
    losses,
    same_runs,
    scalars,
    small_run_args,
    snapshot,
    start,
    step_of,
    train,
)
from tests.slow.ranks import train_ranks
from training.distributed import TORCHRUN_VARIABLES, World
from training.state import Run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.fixture
def world_of(monkeypatch):
    """A function that returns the world of one of four ranks."""
    monkeypatch.setattr("training.distributed.discard_output", lambda: None)
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "4")
    return lambda rank: monkeypatch.setenv("RANK", str(rank)) or World()


def test_rank_variable_that_a_job_left(monkeypatch):
    """With WORLD_SIZE missing, it is a plain run, which prints and saves."""
    monkeypatch.setenv("RANK", "1")
    world = World()
    assert (world.rank, world.size, world.is_main) == (0, 1, True)


def test_ranks_with_mps(world_of, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", pytest.fail)
    with pytest.raises(ResourceError, match=r"^device: mps is one GPU, .* --device=cpu for"):
        world_of(1).connect(torch.device("mps"))


def test_ranks_without_gpus(world_of, monkeypatch):
    """Each rank refuses, before it connects."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "init_process_group", pytest.fail)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    advice = "^2 processes, but 1 GPUs; --nproc_per_node=1, or --device=cpu$"
    for rank in range(2):
        with pytest.raises(ResourceError, match=advice):
            world_of(rank).connect(torch.device("cuda"))


def test_ranks_share_a_batch_equally(world_of):
    assert world_of(1).rows(8) == slice(2, 4)
    with pytest.raises(ConfigError, match=r"batch_size 3 .* a multiple of the 4 processes$"):
        world_of(1).rows(3)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder of the small run with two ranks, and the output of each."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder / "run", train_ranks(
        folder, *small_run_args(folder), f"--out_dir={folder / 'run'}"
    )


def test_ranks_equal_one_process(options, tmp_path):
    """To 1e-5 in float32: sums have another order."""
    one, two = tmp_path / "one", tmp_path / "two"
    options = [*options, "--dropout=0", "--positions=rope"]
    assert train(*options, f"--out_dir={one}")[0] == 0
    train_ranks(tmp_path, *options, f"--out_dir={two}")
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)


def test_rank_0_alone_writes_and_prints(two_ranks):
    run, (printed, other) = two_ranks
    assert printed.count("step 24:") == 1 and ", 2 processes\n" in printed and other == ""
    assert len(list(run.glob("*tfevents*"))) == 1
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(1, STEPS + 1))


def without_the_run(rank: int) -> None:
    """Let rank 1 find no run in the folder, as on a machine that does not share it."""
    if rank == 1:
        pytest.MonkeyPatch().setattr("configs.command.holds_run", lambda _: False)


def with_another_text(rank: int) -> None:
    def load_other(*words):
        corpus = load_corpus(*words)
        return replace(corpus, text=replace(corpus.text, sha256="f" * 64))

    if rank == 1:
        pytest.MonkeyPatch().setattr("train.load_corpus", load_other)


@pytest.mark.parametrize("differs", [without_the_run, with_another_text])
def test_ranks_that_differ(differs, two_ranks, options, tmp_path):
    """In their step or text: each says its own, and the run stays as it is."""
    run = shutil.copytree(two_ranks[0], tmp_path / "run")
    before, words = snapshot(run), [*options, f"--out_dir={run}", "--resume"]
    steps = (24, 0) if differs is without_the_run else (24, 24)
    for step, output in zip(
        steps, train_ranks(tmp_path, *words, each=differs, code=2), strict=True
    ):
        assert f"error: this process begins at step {step} of text " in output
        assert output.count("\n") == 1
    assert snapshot(run) == before


def lose_patience(rank: int) -> None:
    """Let rank 1 lose its patience at step 3, as if its losses were rounded otherwise."""
    if rank == 1:
        Run.out_of_patience = property(lambda run: run.progress.step == 3)


def stop_rank_1(function: str, call: int, rank: int) -> None:
    if rank == 1:
        stop = partial(signal.raise_signal, signal.SIGTERM)
        before_call(pytest.MonkeyPatch(), function, call, stop)


def test_ranks_stop_together(two_ranks, options, tmp_path):
    """What stops one stops all at this step, and resuming is bit-exact."""
    run = tmp_path / "run"
    train_ranks(tmp_path, *options, f"--out_dir={run}", each=lose_patience)
    assert step_of(run) == 3
    evaluating = partial(stop_rank_1, "training.evaluate.window_losses", 2)
    printed = train_ranks(tmp_path, run, each=evaluating, code=143)
    assert step_of(run) == 6
    assert f"to resume:\n  start this with the same torchrun: train.py {run}\n" in printed[0]
    # after it has told the others that it goes on: it says so at the next step
    agreeing = partial(stop_rank_1, "torch.distributed.all_reduce", 12)
    train_ranks(tmp_path, run, each=agreeing, code=143)
    assert step_of(run) == 12
    train_ranks(tmp_path, run)
    assert same_runs(two_ranks[0], run)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_rank_that_is_killed(options, tmp_path):
    """The other ends too, and the run is resumed bit-exactly."""
    whole, killed, options = tmp_path / "whole", tmp_path / "killed", [*options, "--max_iters=100"]
    train_ranks(tmp_path, *options, f"--out_dir={whole}")
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"]
    process = start(*torchrun, *options, f"--out_dir={killed}")
    next(line for line in process.stdout if line.startswith("step "))
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    process.communicate(timeout=60)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert count_checkpoints(killed) and step_of(killed) < 100  # all are whole
    train_ranks(tmp_path, killed)
    assert same_runs(whole, killed)
