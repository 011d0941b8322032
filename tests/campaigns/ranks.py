"""Campaign: kill one of four ranks and resume, until the run is done.

    python -m tests.campaigns.ranks [--full]

torchrun starts each run; kill -9 ends one of its ranks at a random moment. The run is resumed until
it completes, and must end bit-identical to an uninterrupted run. The short form has two ranks.
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

from common.process import end_command
from model import runtime
from tests.campaigns.common import (
    ENVIRONMENT,
    ROOT,
    count_checkpoints,
    merged,
    resume_if_saved,
    run_campaign,
    same_runs,
    small_run_args,
    step_of,
)
from tests.commands import exit_code, train_main
from training import evaluate

# -------------------------------------------------------- ranks without torchrun, for test_ranks.py


def run_ranks(
    folder: Path, *arguments: Sequence[object], each: Callable[[int], None] | None = None
) -> list[tuple]:
    """Start one rank per list of arguments of train.py; return (exit code, stdout, stderr) of each.

    As with torchrun, the others get SIGTERM as soon as one fails. `each` is called first, with the
    rank. A single list starts an ordinary process without ranks. The processes are forks of one
    that has imported torch, which saves seconds.
    """
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "dashboard.report", "torch._dynamo"])
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
    argv: list[str],
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
    end_command(exit_code(train_main, merged(argv)))


def in_float64(_: int) -> None:
    """Compute in float64 what the settings call float32, so that only summation order differs."""
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


# ------------------------------------------------------------------------------------- the campaign


def torchrun(size: int, *arguments: object) -> subprocess.Popen:
    """Start `torchrun --nproc_per_node=SIZE train.py ...`, with stdout and stderr in one pipe."""
    command_line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={size}",
        "train.py",
    ]
    return subprocess.Popen(
        [*command_line, *merged(arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def children(process: subprocess.Popen) -> list[int]:
    """Return the process ids of the ranks of a torchrun."""
    return [
        int(word)
        for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


def campaign(full: bool) -> str:
    total, size, steps = (10, 4, 1000) if full else (1, 2, 60)
    rng, kills, runs, slowest, files = random.Random(0), 0, 0, 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*small_run_args(folder), f"--max_iters={steps}"]
        uninterrupted, killed = folder / "uninterrupted", folder / "killed"
        torchrun(size, *options, f"--out_dir={uninterrupted}").communicate()
        assert step_of(uninterrupted) == steps
        while kills < total:
            while kills < total and (
                not (killed / "last.safetensors").exists() or step_of(killed) < steps
            ):
                process = torchrun(size, *options, f"--out_dir={killed}", *resume_if_saved(killed))
                # the full form also kills after an evaluation, when there is a checkpoint
                line = "step " if full and kills % 2 else "device "
                slowest = max(slowest, _kill(process, line, rng))
                kills += 1
                saved, loadable_count = count_checkpoints(killed)
                assert loadable_count == saved and not list(killed.glob("*.tmp*")), (
                    f"torn files after kill {kills}"
                )
                files += saved
            resume = resume_if_saved(killed)
            torchrun(size, *options, f"--out_dir={killed}", *resume).communicate()
            runs += 1
            assert same_runs(uninterrupted, killed), (
                f"run {runs} differs from the uninterrupted one"
            )
            shutil.rmtree(killed)
    return (
        f"{kills} kills of one of {size} ranks in {runs} runs: {runs} of {runs} end bit-identical "
        f"to an uninterrupted run; the other ranks exited within {slowest:.1f} s; 0 of {files} "
        "checkpoints damaged"
    )


def _kill(process: subprocess.Popen, start: str, rng: random.Random) -> float:
    """Kill a rank soon after a line with this start; return the seconds until all have exited."""
    next(line for line in process.stdout if line.startswith(start))
    time.sleep(rng.uniform(0, 0.5))
    pids = children(process)
    os.kill(rng.choice(pids), signal.SIGKILL)
    start_time = time.monotonic()
    process.communicate(timeout=240)
    seconds = time.monotonic() - start_time
    assert not any(Path(f"/proc/{each}").exists() for each in pids) and seconds < 30, f"{seconds} s"
    return seconds


if __name__ == "__main__":
    run_campaign(campaign)
