"""Several ranks: the losses of a single process, output and files from rank 0 only, joint stops."""

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, ResourceError
from tests.runs import STEPS, at_step, same_runs, scalars, send_at, small_run_args, step_of, train
from tests.slow.ranks import run_ranks
from training.distributed import World
from training.state import Run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


def train_ranks(folder: Path, *arguments: object, each=None, code: int = 0) -> list[str]:
    """Train with two ranks, which end with the exit code; return their stdout, then stderr."""
    ends = run_ranks(folder / "output", arguments, arguments, each=each)
    assert [end[0] for end in ends] == [code, code], ends
    return [end[1] for end in ends] + [end[2] for end in ends]


def record_sockets(folder: Path, rank: int) -> None:
    """Write the network interface and the listening sockets of this process at the first step."""

    def write_sockets():
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "any")
        (folder / f"sockets{rank}").write_text(" ".join([interface, *mine]))

    if sys.platform.startswith("linux"):
        at_step(pytest.MonkeyPatch(), 0, write_sockets)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def world_of(monkeypatch):
    """A function that returns the world of a process with these variables."""
    monkeypatch.setattr("training.distributed.discard_output", lambda: None)
    for name in (*TORCHRUN, "LOCAL_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def world_of(variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return World()

    return world_of


@pytest.mark.parametrize("missing", TORCHRUN)
def test_with_some_of_the_variables_of_torchrun_a_process_is_alone(missing, world_of):
    """A job may have left them; alone it prints and saves, whatever its RANK was."""
    world = world_of({name: value for name, value in TORCHRUN.items() if name != missing})
    assert (world.rank, world.size, world.is_main) == (0, 1, True)


def test_a_launcher_that_sets_the_four_variables_is_enough(world_of):
    world = world_of(TORCHRUN)
    assert (world.rank, world.size, world.is_main) == (1, 4, False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "two"}, "RANK is 'two'; it must be a number, as torchrun sets it"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'; it must be a number, as torchrun sets it"),
        ({"RANK": "4"}, "RANK is 4; it must be below WORLD_SIZE, 4"),
    ],
)
def test_wrong_variables_of_torchrun_are_one_line(changed, message, world_of):
    with pytest.raises(ConfigError) as error:
        world_of(TORCHRUN | changed)
    assert str(error.value) == message


@pytest.mark.parametrize(("gpus", "text"), [(1, "1 GPU"), (0, "0 GPUs")])
def test_more_ranks_than_gpus_are_refused_by_each_rank_before_it_connects(
    gpus, text, world_of, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "init_process_group", pytest.fail)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in "01":
        with pytest.raises(ResourceError) as error:
            world_of(TORCHRUN | {"RANK": rank}).connect(torch.device("cuda"))
        advice = f"--nproc_per_node={gpus}, or --device=cpu"
        assert str(error.value) == f"2 processes, but {text}; {advice}"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Train the small run with two ranks; return its folder, and what `train_ranks` returns."""
    folder = tmp_path_factory.mktemp("two_ranks")
    arguments = [*small_run_args(folder), f"--out_dir={folder / 'run'}"]
    return folder / "run", train_ranks(folder, *arguments, each=partial(record_sockets, folder))


# ---------------------------------------------------------------- equality with a single process


def test_two_ranks_have_the_losses_of_one_process(options, tmp_path):
    """To 1e-5 in float32: sums have another order."""
    one, two = tmp_path / "one", tmp_path / "two"
    options = [*options, "--dropout=0", "--positions=rope"]
    assert train(*options, f"--out_dir={one}")[0] == 0
    train_ranks(tmp_path, *options, f"--out_dir={two}")
    for tag in ("train/loss", "val/loss"):
        expected, found = ([loss for _, loss in scalars(run)[tag]] for run in (one, two))
        assert found == pytest.approx(expected, abs=1e-5)
    assert len(scalars(two)["train/loss"]) == STEPS


def test_a_batch_that_the_ranks_cannot_share_equally_is_an_error(world_of):
    with pytest.raises(ConfigError, match=r"batch_size 3 .* 4 processes; nearest above: 4$"):
        world_of(TORCHRUN).rows(3)


# --------------------------------------------------------------------------------- output and files


def test_only_rank_0_writes_files_and_prints(two_ranks):
    run, (printed_by_0, *others) = two_ranks
    assert printed_by_0.count("step 24:") == 1 and ", 2 processes, " in printed_by_0
    assert others == ["", "", ""]
    assert len(list(run.glob("*tfevents*"))) == 1
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(1, STEPS + 1))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_on_one_machine_ranks_listen_only_on_the_loopback_interface(two_ranks):
    # rank 1 only: rank 0 also has the store's socket
    sockets = (two_ranks[0].parent / "sockets1").read_text()
    assert re.fullmatch(r"lo( 0100007F:\w{4})+", sockets)


def test_ranks_with_different_commands_end_before_the_first_step(options, tmp_path):
    words = [*options, f"--out_dir={tmp_path / 'run'}"]
    ends = run_ranks(tmp_path / "output", words, [*words, "--max_iters=4"])
    assert 2 in [code for code, *_ in ends] and all(code for code, *_ in ends)
    error = f"error: max_iters: the processes have {STEPS} and 4; all must be equal;"
    assert any(stderr.startswith(error) for _, _, stderr in ends)
    assert not list((tmp_path / "run").glob("*.safetensors"))


# ---------------------------------------------------------------------------- stopping and resuming


def lose_patience(rank: int) -> None:
    """Let rank 1 lose its patience at step 3, as if its losses were rounded otherwise."""
    if rank == 1:
        Run.out_of_patience = property(lambda run: run.progress.step == 3)


def signal_rank_1(phase: str, call: int, rank: int) -> None:
    if rank == 1:
        send_at(phase, "SIGTERM", call)


def test_what_stops_one_rank_stops_all_at_this_step_and_resuming_is_bit_exact(
    two_ranks, options, tmp_path
):
    run = tmp_path / "run"
    train_ranks(tmp_path, *options, f"--out_dir={run}", each=lose_patience)
    assert step_of(run) == 3
    printed = train_ranks(tmp_path, run, each=partial(signal_rank_1, "evaluate", 2), code=143)
    assert step_of(run) == 6
    assert f"to resume:\n  start this with the same torchrun: train.py {run}\n" in printed[0]
    # after it has told the others that it goes on: it says so at the next step
    train_ranks(tmp_path, run, each=partial(signal_rank_1, "agree", 11), code=143)
    assert step_of(run) == 12
    train_ranks(tmp_path, run)
    assert same_runs(two_ranks[0], run)


def test_one_process_can_resume_a_run_of_several_ranks(two_ranks, tmp_path):
    run = shutil.copytree(two_ranks[0], tmp_path / "run")
    code, output = train(run, f"--max_iters={STEPS + 3}")
    assert code == 0 and step_of(run) == STEPS + 3
    assert "\nnote: ranks 2 -> 1: the result will differ from an uninterrupted run\n" in output
