"""Several ranks: the losses of a single process, output and files from rank 0 only, joint stops."""

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from run.checkpoint import LAST
from tests.runs import (
    at_step,
    contents,
    run_ranks,
    same_runs,
    scalars,
    send_at,
    small_run_args,
    step_of,
    torchrun,
    train,
)
from training.distributed import World
from training.state import Run
from training.step import step_seed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
STEPS = 50
EQUAL = ["--dropout=0", f"--max_iters={STEPS}", "--eval_interval=25", "--positions=rope"]


def test_variables_of_torchrun_without_a_rank_do_not_make_several_processes(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    world = World.from_environment()
    assert world.is_main and world.size == 1


def train_ranks(folder: Path, size: int, *arguments: object, each=None) -> list[str]:
    """Train with ranks, of which none may fail; return their stdout, then their stderr."""
    ends = run_ranks(folder / "output", *[arguments] * size, each=each)
    assert [code for code, *_ in ends] == [0] * size, ends
    return [end[1] for end in ends] + [end[2] for end in ends]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Train the small run with two ranks; return its folder, beside the `train_ranks` of it."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run = folder / "run"
    return run, train_ranks(folder, 2, *small_run_args(folder), f"--out_dir={run}")


@pytest.fixture
def one_step(options, tmp_path):
    """The arguments of a run of one step."""
    return [*options, "--max_iters=1", "--warmup_ratio=0", f"--out_dir={tmp_path / 'run'}"]


# ---------------------------------------------------------------- equality with a single process


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_ranks_have_the_losses_of_one_process(optimizer, options, tmp_path):
    """To 1e-5 in float32: sums have another order."""
    one, two = [], []
    for losses, size in ((one, 1), (two, 2)):
        run = tmp_path / f"{size}"
        train_ranks(
            tmp_path, size, *options, *EQUAL, f"--optimizer={optimizer}", f"--out_dir={run}"
        )
        losses += [loss for _, loss in scalars(run)["train/loss"]]
        losses.append(contents(run / LAST)["progress"]["best_loss"])
    assert len(one) == STEPS + 1 and two == pytest.approx(one, abs=1e-5)


def test_each_step_and_rank_has_its_own_dropout_seed():
    seeds = {step_seed(1, step, rank) for step in range(9) for rank in range(9)}
    assert len(seeds) == 81


# ------------------------------------------------------------------------- output and files, errors


def test_only_rank_0_writes_files_and_prints(two_ranks):
    run, (printed_by_0, *others) = two_ranks
    assert printed_by_0.count("step 24:") == 1 and "2 processes on 1 machine, " in printed_by_0
    assert others == ["", "", ""]
    assert len(list(run.glob("*tfevents*"))) == 1
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(1, 25))


WRONG = [  # options of both ranks, more options of rank 1, message
    ([], ["--max_iters=4"], "max_iters: the processes have 1 and 4; all must be equal;"),
    ([], ["--val_sources=data/plays"], "text: the processes have .* and "),
    (["--batch_size=3"], [], "batch_size 3 .* nearest above: 4"),
]


@pytest.mark.parametrize("both, more, error", WRONG)
def test_ranks_that_cannot_train_together_end_before_the_first_step(
    both, more, error, one_step, tmp_path
):
    words = [*one_step, *both]
    ends = run_ranks(tmp_path / "output", words, [*words, *more])
    assert 2 in [end[0] for end in ends] and all(end[0] for end in ends)
    assert any(re.match(f"error: {error}", end[2]) for end in ends)
    assert not list((tmp_path / "run").glob("*.safetensors"))


def record_sockets(folder: Path, rank: int) -> None:
    """Write the network interface and the listening sockets of this process at the first step."""

    def write_sockets():
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "any")
        (folder / f"sockets{rank}").write_text(" ".join([interface, *mine]))

    at_step(pytest.MonkeyPatch(), 0, write_sockets)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_on_one_machine_ranks_listen_only_on_the_loopback_interface(one_step, tmp_path):
    train_ranks(tmp_path, 2, *one_step, each=partial(record_sockets, tmp_path))
    # rank 1 only: rank 0 also has the store's socket
    assert re.fullmatch(r"lo( 0100007F:\w{4})+", (tmp_path / "sockets1").read_text())


# ---------------------------------------------------------------------------- stopping and resuming


def signal_rank(phase: str, call: int, target: int, rank: int) -> None:
    if rank == target:
        send_at(phase, "SIGTERM", call)


@pytest.mark.parametrize(
    "phase, call, target, steps",
    [
        ("step", 9, 1, [9]),
        ("evaluate", 2, 1, [6]),
        ("draw", 2, 0, [12]),
        ("save", 7, 0, range(24)),
        # after it has told the others that it goes on: it says so at the next step
        ("agree", 11, 1, [6]),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_this_step_and_resuming_is_bit_exact(
    phase, call, target, steps, two_ranks, options, tmp_path
):
    run = tmp_path / "run"
    arguments = [*options, f"--out_dir={run}"]
    each = partial(signal_rank, phase, call, target)
    stopped = run_ranks(tmp_path, arguments, arguments, each=each)
    assert [code for code, *_ in stopped] == [143, 143]
    assert f"to resume:\n  start this with the same torchrun: train.py {run}\n" in stopped[0][1]
    assert step_of(run) in steps
    train_ranks(tmp_path, 2, run)
    assert same_runs(two_ranks[0], run)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a launcher is slow to start")
def test_sigterm_to_torchrun_stops_all_ranks_and_one_process_can_resume(options, tmp_path):
    run, more = tmp_path / "run", ["--max_iters=2000", "--warmup_ratio=0"]
    process = torchrun(2, *options, *more, f"--out_dir={run}")
    next(line for line in process.stdout if line.startswith("first loss "))
    process.terminate()
    output = process.communicate(timeout=240)[0]
    for line in ("stopping: finishing this step", "stopped and saved at step"):
        assert output.count(line) == 1
    step = step_of(run)
    assert 0 < step < 2000
    code, output = train(options[0], f"--out_dir={run}", "--resume", f"--max_iters={step + 3}")
    assert code == 0 and step_of(run) == step + 3
    assert "\nworld_size 2 -> 1\n" in output
    assert "\nthe result will not be bit-identical to that of an uninterrupted run\n" in output


def lose_patience(rank: int) -> None:
    """Let rank 1 lose its patience at step 3, as if its losses were rounded otherwise."""
    if rank == 1:
        Run.out_of_patience = property(lambda run: run.progress.step == 3)


def test_one_rank_that_is_out_of_patience_stops_all(options, tmp_path):
    run = tmp_path / "run"
    train_ranks(tmp_path, 2, *options, f"--out_dir={run}", each=lose_patience)
    assert step_of(run) == 3
