"""Characters per second against the number of processes on this machine: python -m benchmarks.scale
[--ranks 1 2 4]

The global batch stays, and the processor's cores are divided: what a second process gains is what
one leaves idle, and what it costs is the averaging of gradients and, in every process, whatever
does not depend on the rows of its batch.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
STEPS, LINES = 60, 10  # of which the first line is of the start
OPTIONS = [
    "configs/nanogpt_cpu.yaml",
    "--data.sources=data/plays",
    "--device=cpu",
    "--dtype=float32",
    "--sample_chars=0",
    f"--max_iters={STEPS}",
    f"--log_interval={STEPS // LINES}",
    "--warmup_iters=0",
]


def speed(ranks: int, threads: int) -> float:
    """Median characters per second of a run of so many processes of so many threads each."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        words = [*launcher, "train.py", *OPTIONS, f"--out_dir={folder}"]
        subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        values = EventAccumulator(folder).Reload().Scalars("train/tokens_per_sec")
        return statistics.median(each.value for each in values[2:])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    cores, alone = len(os.sched_getaffinity(0)), None
    print(
        f"{cores} cores\n{'processes':>9}{'threads each':>14}{'characters/s':>14}{'times one':>11}"
    )
    for ranks in parser.parse_args(arguments).ranks:
        threads = max(1, cores // ranks)
        found = speed(ranks, threads)
        alone = alone or found
        print(f"{ranks:>9}{threads:>14}{found:>14,.0f}{found / alone:>11.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
