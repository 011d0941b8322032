"""A rank of four is killed, resume, until done: python -m tests.campaigns.ranks [--full]

Each run is that of torchrun, ended by kill -9 of one of its ranks at a random moment, and resumed
until it reaches its end, which must be that of a run of as many ranks that nobody disturbed. The
short form has two ranks.
"""

import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch

from common.errors import run_command
from tests.campaigns.common import ENVIRONMENT, ROOT, command, loadable, same, small, step_of
from train import main
from training import evaluate, runtime

PLAIN = ["--dropout=0", "--batch_size=4", "--eval_interval=20", "--save_interval=10"]


# ---------------------------------------------------------- ranks without a launcher, for the tests


def ranks(
    folder: Path, *arguments: Sequence[object], each: Callable[[int], None] | None = None
) -> list[tuple]:
    """Start one process for each list of arguments of train.py, as torchrun would; (exit code,
    stdout, stderr) of each.

    As soon as one fails, the others are sent SIGTERM. `each` is called first, with the rank. One
    list alone makes a process that knows of no ranks. The processes are forks of one that has
    imported torch, which saves seconds.
    """
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "dashboard.report", "torch._dynamo"])
    told = (len(arguments), _free_port(), folder)
    processes = [
        context.Process(target=_rank, args=(rank, *told, [str(word) for word in words], each))
        for rank, words in enumerate(arguments)
    ]
    for rank, process in enumerate(processes):
        for stream in "12":
            (folder / f"{stream}{rank}").write_text(
                ""
            )  # the process may be ended before it has opened them
        process.start()
    while alive := [process.sentinel for process in processes if process.exitcode is None]:
        slow = not wait(alive, timeout=240)
        if slow or any(process.exitcode for process in processes):
            for process in processes:
                process.kill() if slow else process.terminate()
    texts = [
        [(folder / f"{stream}{rank}").read_text() for stream in "12"]
        for rank in range(len(processes))
    ]
    return [(process.exitcode, *text) for process, text in zip(processes, texts, strict=True)]


def _rank(
    rank: int,
    size: int,
    port: int,
    folder: Path,
    words: list[str],
    each: Callable[[int], None] | None,
) -> None:
    for stream in (1, 2):
        os.dup2(os.open(folder / f"{stream}{rank}", os.O_WRONLY), stream)
    if size > 1:
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_PORT": port,
        }
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_RUN_ID": "test",
        }
    os.chdir(ROOT)
    torch.set_num_threads(1)
    if each:
        each(rank)
    sys.argv = ["train.py", *words]
    sys.exit(run_command(main))


def in_float64(_: int) -> None:
    """Let a run in "float32" be one in float64, where nothing but the order of sums is left of a
    difference.
    """
    torch.set_default_dtype(torch.float64)
    runtime.DTYPES["float32"] = torch.float64
    runtime.Runtime.autocast = lambda _: torch.autocast("cpu", enabled=False)
    torch.Tensor.float = torch.Tensor.double
    assert (
        evaluate.cross_entropy(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64)).dtype
        == torch.float64
    )


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


# ------------------------------------------------------------------------------ the campaign itself


def torchrun(size: int, *arguments: object) -> subprocess.Popen:
    """`torchrun --nproc_per_node=SIZE train.py ...`; both outputs in one pipe."""
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}", "train.py"]
    return subprocess.Popen(
        [*words, *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def children(process: subprocess.Popen) -> list[int]:
    """The ids of the ranks that a torchrun has started."""
    return [
        int(word)
        for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


def campaign(full: bool) -> str:
    wanted, size, steps = (10, 4, 100) if full else (1, 2, 60)
    chance, kills, runs, slowest, files = random.Random(0), 0, 0, 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*small(folder), f"--max_iters={steps}"]
        undisturbed, killed = folder / "undisturbed", folder / "killed"
        torchrun(size, *options, f"--out_dir={undisturbed}").communicate()
        assert step_of(undisturbed) == steps
        while kills < wanted:
            while kills < wanted and (
                not (killed / "last.safetensors").exists() or step_of(killed) < steps
            ):
                slowest = max(
                    slowest,
                    _kill(torchrun(size, *options, f"--out_dir={killed}", "--resume"), chance),
                )
                kills += 1
                there, good = loadable(killed)
                assert good == there and not list(killed.glob("*.tmp.*")), (
                    f"torn files after kill {kills}"
                )
                files += there
            torchrun(size, *options, f"--out_dir={killed}", "--resume").communicate()
            runs += 1
            assert same(undisturbed, killed), f"run {runs} does not end as the undisturbed one"
            shutil.rmtree(killed)
    return (
        f"{kills} ranks of {size} killed in {runs} runs: {runs} of {runs} end to the last bit as "
        f"the undisturbed run; "
        f"the others had ended after {slowest:.1f} s at most; 0 of {files} files unloadable"
    )


def _kill(process: subprocess.Popen, chance: random.Random) -> float:
    """Kill a rank at some moment of training; the seconds until all have ended."""
    next(line for line in process.stdout if line.startswith("first loss"))
    time.sleep(chance.uniform(0, 0.5))
    ranks = children(process)
    os.kill(chance.choice(ranks), signal.SIGKILL)
    began = time.monotonic()
    process.communicate(timeout=240)
    seconds = time.monotonic() - began
    assert not any(Path(f"/proc/{each}").exists() for each in ranks) and seconds < 30, (
        f"{seconds} s"
    )
    return seconds


if __name__ == "__main__":
    command(campaign)
