"""Kill one of several ranks that torchrun started, and resume.

    python -m tests.stress.ranks [--full]

Shows that the other ranks exit within seconds, that no checkpoint is torn, and that the resumed run
ends bit-identical to an uninterrupted one. The full form kills one of four ranks, ten times.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.runs import count_checkpoints, same_runs, small_run_args, step_of
from tests.slow.ranks import run_ranks, torchrun
from tests.stress import main


def stress(full: bool) -> str:
    total, size, steps = (10, 4, 1000) if full else (1, 2, 300)
    rng, kills, runs, slowest = random.Random(0), 0, 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*small_run_args(folder), f"--max_iters={steps}", "--resume"]
        uninterrupted, killed = folder / "uninterrupted", folder / "killed"

        def finish(run: Path) -> None:
            ends = run_ranks(folder / "output", *[[*options, f"--out_dir={run}"]] * size)
            assert [code for code, *_ in ends] == [0] * size, ends

        finish(uninterrupted)
        while kills < total:
            while kills < total and not (
                (killed / "last.safetensors").exists() and step_of(killed) == steps
            ):
                process = torchrun(size, *options, f"--out_dir={killed}")
                # after an evaluation there is a checkpoint; the full form also kills before it
                line = "device " if full and kills % 2 else "step "
                slowest = max(slowest, _kill(process, line, rng))
                kills += 1
                count_checkpoints(killed)  # all are whole
                assert not list(killed.glob("*.tmp*"))
            finish(killed)
            runs += 1
            assert same_runs(uninterrupted, killed), f"run {runs} differs"
            shutil.rmtree(killed)
    return (
        f"{kills} kills of one of {size} ranks in {runs} runs: all end bit-identical to an "
        f"uninterrupted run; the other ranks exited within {slowest:.1f} s; no checkpoint damaged"
    )


def _kill(process: subprocess.Popen, start: str, rng: random.Random) -> float:
    """Kill a rank soon after a line with this start; return the seconds until all have exited."""
    next(line for line in process.stdout if line.startswith(start))
    time.sleep(rng.uniform(0, 0.5))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    pids = [int(pid) for pid in children.split()]
    os.kill(rng.choice(pids), signal.SIGKILL)
    start_time = time.monotonic()
    process.communicate(timeout=240)
    seconds = time.monotonic() - start_time
    assert not any(Path(f"/proc/{each}").exists() for each in pids) and seconds < 30, f"{seconds} s"
    return seconds


if __name__ == "__main__":
    main(stress)
