"""Campaign: short runs of two ranks, started by torchrun, must exit without an error.

    python -m tests.campaigns.ends [--full]

Two runs share the machine at any time. A thread of the process group that outlives it would crash
about one run in a hundred while Python shuts down, after everything was saved.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.common import run_campaign, small_run_args, start, step_of

STEPS = 2
FULL_RUNS = 1000
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]


def campaign(full: bool) -> str:
    total = FULL_RUNS if full else 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = _runs(folder, total)
        alive = [next(runs), next(runs)]
        for number in range(1, total + 1):
            out_dir, process = alive.pop(0)
            output = process.communicate(timeout=240)[0]
            assert process.returncode == 0 and "terminate called" not in output, (number, output)
            assert step_of(out_dir) == STEPS, (number, output)
            if number % 100 == 0:
                print(f"{number} runs", flush=True)
            started = next(runs, None)
            if started:
                alive.append(started)
    return f"{total} of {total} runs of 2 ranks ended without an error"


def _runs(folder: Path, total: int) -> Iterator[tuple]:
    """Start one run after another; yield the run folder and the process of each."""
    options = [*small_run_args(folder), f"--max_iters={STEPS}", "--warmup_iters=0"]
    for number in range(total):
        out_dir = folder / str(number)
        yield out_dir, start(*TORCHRUN, *options, f"--out_dir={out_dir}")


if __name__ == "__main__":
    run_campaign(campaign)
