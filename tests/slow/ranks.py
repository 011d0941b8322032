"""Processes that train together, as torchrun starts them, but in a second."""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT
from tests.runs import exit_code, train_main


def train_ranks(
    folder: Path, *arguments: object, on_rank_1: Callable[[], None] | None = None, code: int = 0
) -> list[str]:
    """Run train.py with two ranks, which end with the exit code; return the output of each.

    Rank 1 first calls `on_rank_1`. The ranks are forks of a process that has imported torch, which
    saves seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "storage.log", "torch._dynamo"])
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    files = [folder / "rank0", folder / "rank1"]
    processes = []
    for rank, file in enumerate(files):
        file.write_text("")
        process = context.Process(target=_rank, args=(rank, port, file, arguments, on_rank_1))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(120)  # one that has failed may let the other wait
        process.kill()
    outputs = [file.read_text() for file in files]
    assert [process.exitcode for process in processes] == [code, code], outputs
    return outputs


def _rank(rank: int, port: int, file: Path, argv: tuple, on_rank_1: Callable | None) -> None:
    for stream in (1, 2):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if on_rank_1 and rank == 1:
        on_rank_1()
    sys.exit(exit_code(train_main, argv))
