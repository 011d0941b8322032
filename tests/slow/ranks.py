"""Processes that train together, as torchrun starts them, but in a second."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch

from tests.commands import exit_code, train_main
from tests.conftest import ROOT
from tests.runs import start
from training import device, evaluate


def torchrun(size: int, *arguments: object) -> subprocess.Popen:
    """Start `torchrun --nproc_per_node=SIZE train.py ...`, with stdout and stderr in one pipe."""
    return start("-m", "torch.distributed.run", f"--nproc_per_node={size}", "train.py", *arguments)


def run_ranks(
    folder: Path, *arguments: Sequence[object], each: Callable[[int], None] | None = None
) -> list[tuple]:
    """Start one rank per list of arguments of train.py; return (exit code, stdout, stderr) of each.

    As with torchrun, the others get SIGTERM as soon as one fails, and SIGKILL 30 seconds later.
    `each` is called first, with the rank. A single list starts an ordinary process without ranks.
    The processes are forks of one that has imported torch, which saves seconds.
    """
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "storage.log", "torch._dynamo"])
    common = (len(arguments), _free_port(), folder)
    processes = [
        context.Process(target=_rank, args=(rank, *common, [str(word) for word in argv], each))
        for rank, argv in enumerate(arguments)
    ]
    for rank, process in enumerate(processes):
        for stream in "12":
            (folder / f"{stream}{rank}").write_text("")  # in case the process ends early
        process.start()
    while alive := [process.sentinel for process in processes if process.exitcode is None]:
        if failed := any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
        # a rank may be about to replace its signal handler, and miss the signal
        if not wait(alive, timeout=30 if failed else 240):
            for process in processes:
                process.kill()
    return [
        (process.exitcode, *((folder / f"{stream}{rank}").read_text() for stream in "12"))
        for rank, process in enumerate(processes)
    ]


def _rank(
    rank: int,
    size: int,
    port: int,
    folder: Path,
    argv: list[str],
    each: Callable[[int], None] | None,
) -> None:
    for stream in (1, 2):
        os.dup2(os.open(folder / f"{stream}{rank}", os.O_WRONLY), stream)
    if size > 1:
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "test",
        }
        os.environ |= {name: str(value) for name, value in variables.items()}
    os.chdir(ROOT)
    torch.set_num_threads(1)
    # a SIGTERM because another rank failed must not change the exit code of a run that has ended
    signal.signal(signal.SIGTERM, lambda *_: None)
    if each:
        each(rank)
    sys.exit(exit_code(train_main, argv))


def in_float64(_: int) -> None:
    """Compute in float64 what the settings call float32, so that only summation order differs."""
    torch.set_default_dtype(torch.float64)
    device.DTYPES["float32"] = torch.float64
    device.Runtime.autocast = lambda _: torch.autocast("cpu", enabled=False)
    torch.Tensor.float = torch.Tensor.double
    loss = evaluate.cross_entropy(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64))
    assert loss.dtype == torch.float64


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]
