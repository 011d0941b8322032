"""Training speed by number of processes: python -m benchmarks.scale

All runs have the same global batch and divide the CPU cores of this machine among their processes.
A second process gains the time for which a single one leaves cores idle. It costs the averaging of
gradients and, in each process, the work that does not depend on its share of the batch.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.runs import load_events

ROOT = Path(__file__).parent.parent
PROCESSES = (1, 2, 4)
STEPS, LOG_INTERVAL = 60, 6
OPTIONS = [
    "configs/nanogpt_cpu.yaml",
    "--data.sources=data/plays",
    "--device=cpu",
    "--dtype=float32",
    "--sample_chars=0",
    f"--max_iters={STEPS}",
    f"--log_interval={LOG_INTERVAL}",
    "--warmup_iters=0",
]


def training_speed(processes: int, threads: int) -> float:
    """Train with `threads` threads in each process; return the median characters/s."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
        command = [*launcher, "train.py", *OPTIONS, f"--out_dir={folder}"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        speeds = load_events(Path(folder)).Scalars("train/tokens_per_sec")
    return statistics.median(each.value for each in speeds[2:])  # the first intervals warm up


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores")
    print(f"{'processes':>9}{'threads each':>14}{'characters/s':>14}{'speedup':>11}")
    baseline = None
    for processes in PROCESSES:
        threads = max(1, cores // processes)
        speed = training_speed(processes, threads)
        baseline = baseline or speed
        print(f"{processes:>9}{threads:>14}{speed:>14,.0f}{speed / baseline:>11.2f}", flush=True)


if __name__ == "__main__":
    main()
