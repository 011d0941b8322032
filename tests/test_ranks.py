"""Several ranks: the losses of a single process, output and files from rank 0 only, joint stops."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from checkpointing import checkpoint
from checkpointing.checkpoint import BEST, LAST, PREV
from common import torchrun as torchrun_variables
from common.console import program
from common.errors import ConfigError, ResourceError
from common.signals import Stop
from common.torchrun import NOT_LAUNCHED, VARIABLES, Ranks
from model import runtime
from tests.runs import (
    ENVIRONMENT,
    ROOT,
    SMALL,
    at_step,
    contents,
    in_float64,
    run_ranks,
    same_runs,
    scalars,
    send_at,
    small_run_args,
    step_of,
    torchrun,
)
from training import environment
from training.distributed import World

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
STEPS = 50
EQUAL = ["--dropout=0", f"--max_iters={STEPS}", "--eval_interval=25", "--positions=rope"]


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
    return [*options, "--max_iters=1", "--warmup_iters=0", f"--out_dir={tmp_path / 'run'}"]


def world_of(size: int, rank: int = 0) -> World:
    """Return the World of a process that torchrun started on one machine."""
    return World(Ranks(rank, size, rank, size, launched=True), Stop())


# ---------------------------------------------------------------- equality with a single process


@pytest.mark.parametrize(
    "optimizer, each, tolerance",
    [("adamw", in_float64, 1e-12), ("muon", in_float64, 1e-12), ("muon", None, 1e-5)],
)
def test_two_ranks_have_the_losses_of_one_process(optimizer, each, tolerance, options, tmp_path):
    losses = []
    for size in (1, 2):
        run = tmp_path / f"{size}"
        words = [*options, *EQUAL, f"--optimizer={optimizer}", f"--out_dir={run}"]
        train_ranks(tmp_path, size, *words, each=each)
        progress = contents(run / LAST)["progress"]
        losses.append([*progress["recent_losses"], progress["best_loss"]])
    one, two = losses
    assert len(one) == len(two) == STEPS + 1
    assert 0 < max(abs(a - b) for a, b in zip(one, two, strict=True)) < tolerance


def count_sums(folder: Path, rank: int) -> None:
    """Write one character to a file for each all-reduce of gradients."""
    init = DistributedDataParallel.__init__

    def init_with_hook(self, *arguments, **options):
        init(self, *arguments, **options)
        group = self.process_group

        def hook(_, bucket):
            with open(folder / f"sums{rank}", "a") as file:
                file.write("x")
            work = torch.distributed.all_reduce(
                bucket.buffer().div_(group.size()), group=group, async_op=True
            )
            return work.get_future().then(lambda done: done.value()[0])

        self.register_comm_hook(None, hook)

    DistributedDataParallel.__init__ = init_with_hook


def test_gradients_are_averaged_once_per_step_with_gradient_accumulation(one_step, tmp_path):
    words = [*one_step, "--gradient_accumulation_steps=4", "--max_iters=4"]
    train_ranks(tmp_path, 2, *words, each=partial(count_sums, tmp_path))
    before_the_first_step = 1  # see World.wrap_ddp
    for rank in (0, 1):
        assert len((tmp_path / f"sums{rank}").read_text()) == 4 + before_the_first_step


def test_each_step_and_rank_has_its_own_dropout_seed():
    seeds = {environment.step_seed(1, step, rank) for step in range(9) for rank in range(9)}
    assert len(seeds) == 81


# ------------------------------------------------------------------------- output and files, errors


def test_only_rank_0_writes_files_and_prints(two_ranks):
    run, (printed_by_0, *others) = two_ranks
    assert printed_by_0.count("step 24:") == 1 and "2 processes on 1 machine(s)" in printed_by_0
    assert others == ["", "", ""]
    assert len(list(run.glob("*tfevents*"))) == 2  # one describes the run
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(1, 25))


def test_a_checkpoint_does_not_depend_on_the_number_of_ranks(two_ranks, train_run, tmp_path):
    assert train_run()[0] == 0
    one, two = (contents(run / LAST) for run in (tmp_path / "run", two_ranks[0]))
    shapes = [{name: t.shape for name, t in each["tensors"].items()} for each in (one, two)]
    assert shapes[0] == shapes[1]
    assert one["environment"] | {"world_size": 2} == two["environment"]


def wait_longer(_: int) -> None:
    """Wait longer for the message of rank 0, since the test machine may be slow."""
    torchrun_variables.GRACE_SECONDS = 120.0


DIFFERENT = r"error: the settings or the text of process 1 .*"
FAILURES = [  # options of each rank; exit code and message
    (["--n_laier=3"], ["--n_laier=3"], 2, r"error: .*n_laier.*"),
    (["--batch_size=3"], ["--batch_size=3"], 2, "error: batch_size 3 .* nearest above: 4"),
    (["--n_layer=1"], ["--n_layer=2"], 2, DIFFERENT + "model.n_layer 1 -> 2.*same command.*"),
    (["--data.sources=data/plays/admiral.txt"], [], 2, DIFFERENT + r"data.sha256 \w{64} -> \w.*"),
    ([], ["--data.sources=nowhere"], 3, "error: data.sources: .*nowhere.*"),  # on rank 1
    (["--resume=nowhere"], ["--resume=nowhere"], 4, "error: nowhere: no such file.*"),  # on rank 0
]


@pytest.mark.parametrize("first, second, code, error", FAILURES)
def test_an_error_on_any_rank_is_printed_once_and_ends_all_ranks(
    first, second, code, error, tmp_path
):
    arguments = [*SMALL, f"--out_dir={tmp_path / 'run'}"]
    ends = run_ranks(tmp_path, [*arguments, *first], [*arguments, *second], each=wait_longer)
    (code_of_0, _, stderr), (code_of_1, _, stderr_of_1) = ends
    assert code_of_0 == code and code_of_1 and not stderr_of_1  # torchrun may end rank 1 early
    assert re.fullmatch(error + "\n", stderr) and not list((tmp_path / "run").glob("*.safetensors"))


def test_more_ranks_than_gpus_are_rejected_with_the_number_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = r"3 processes .* its 2 GPUs; .*--nproc_per_node=2"
    with pytest.raises(ResourceError, match=message) as caught:
        runtime.select_runtime("auto", "float32", world_of(3).ranks)
    assert caught.value.exit_code == 5


def test_the_batch_slices_of_all_ranks_are_the_whole_batch():
    rows = list(range(12))
    slices = [world_of(4, rank).ranks.batch_slice(12) for rank in range(4)]
    assert [row for each in slices for row in rows[each]] == rows
    assert rows[NOT_LAUNCHED.batch_slice(12)] == rows
    with pytest.raises(ConfigError):
        world_of(5).ranks.batch_slice(12)


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
        ("sample", 2, 0, [12]),
        ("save", 7, 0, range(1, 24)),
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
    command = f"{shlex.quote(program('torchrun'))} --nproc_per_node=2 train.py "
    assert f"{command}configs/smoke.yaml " in stopped[0][1]
    assert step_of(run) in steps
    train_ranks(tmp_path, 2, *arguments, "--resume")
    assert same_runs(two_ranks[0], run)


def choose_on_rank_0(rank: int) -> None:
    def choose(*_):
        raise AssertionError("only rank 0 may choose a checkpoint")

    if rank:
        pytest.MonkeyPatch().setattr(checkpoint, "find", choose)


@pytest.mark.parametrize("option", ["--resume", "--init_from"])
def test_rank_0_chooses_the_checkpoint_and_the_others_read_that_one(
    option, two_ranks, options, tmp_path
):
    run = shutil.copytree(two_ranks[0], tmp_path / "run")
    (run / BEST).write_bytes(b"")  # so --init_from, which prefers it, uses the last one
    shutil.copy(run / LAST, run / PREV)
    if option == "--resume":
        (run / LAST).write_bytes(b"")
    chosen = run / (PREV if option == "--resume" else LAST)
    words = [*options, f"--out_dir={tmp_path / 'new'}", f"{option}={run}"]
    output, *_ = train_ranks(tmp_path, 2, *words, each=choose_on_rank_0)
    assert f"; using {chosen} instead" in output


def kill_rank_1(rank: int) -> None:
    if rank == 1:
        at_step(pytest.MonkeyPatch(), 10, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_after_a_killed_rank_the_other_names_the_last_checkpoint_and_the_command(options, tmp_path):
    """tests/stress/ranks.py shows that resuming is bit-exact then, and that no file is torn."""
    arguments = [*options, f"--out_dir={tmp_path / 'run'}"]
    (first, _, error), (second, *_) = run_ranks(tmp_path, arguments, arguments, each=kill_rank_1)
    assert (first, second) == (5, -signal.SIGKILL)
    assert re.search(
        r"error: another process of this run has ended.*the last checkpoint is .*; try: \S*torch",
        error,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a launcher is slow to start")
def test_sigterm_to_torchrun_stops_all_ranks_and_one_process_can_resume(
    options, train_run, tmp_path
):
    run, more = tmp_path / "run", ["--max_iters=2000", "--warmup_iters=0"]
    process = torchrun(2, *options, *more, f"--out_dir={run}")
    next(line for line in process.stdout if line.startswith("device "))
    time.sleep(0.3)
    process.terminate()
    output = process.communicate(timeout=240)[0]
    for line in ("stopping: finishing this step", "stopped and saved at step"):
        assert output.count(line) == 1
    step = step_of(run)
    assert 0 < step < 2000
    code, output = train_run(*more, "--resume", f"--max_iters={step + 3}")
    assert code == 0 and step_of(run) == step + 3
    (line,) = (line for line in output.splitlines() if line.startswith("resuming"))
    assert "; world_size 2 -> 1" in line and line.endswith(
        "the result will not be bit-identical to that of an uninterrupted run"
    )


# ------------------------------------------------------------------------------------ the launcher


THREADS = """
import os, sys, threading
from common.signals import Stop
from common.torchrun import Ranks
from pathlib import Path
import torch
from model.gpt import GPT
from configs.schema import ModelConfig
from training.distributed import World

def threads():
    names = (Path(f"/proc/self/task/{id}/comm").read_text() for id in os.listdir("/proc/self/task"))
    return sorted(name.strip() for name in names)

before = threads()
with Stop() as stop, World(Ranks.from_environment(os.environ), stop) as world:
    world.init_process_group(torch.device("cpu"))
    network = world.wrap_ddp(GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), 5))
    during = threads()
    del network
print(len(during) - len(before), *(set(threads()) - set(before)))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads in /proc")
def test_no_thread_of_gloo_outlives_the_group():
    environment = dict(zip(VARIABLES, "01011", strict=True))
    environment |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        cwd=ROOT, env=ENVIRONMENT | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    started, *left = done.stdout.split()
    assert int(started) > 0 and left == []
