"""Campaign: kill -9 at random moments, and resume until the run is done.

    python -m tests.campaigns.kills [--full]

Each run must end bit-identical to an uninterrupted run.
"""

import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.campaigns.common import (
    count_checkpoints,
    run_campaign,
    same_runs,
    scalars,
    small_run_args,
    start,
    step_of,
)

SAVE_INTERVAL = 4


def campaign(full: bool) -> str:
    total, steps = (200, 600) if full else (3, 100)
    rng, kills, runs, lost, files = random.Random(0), 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*small_run_args(folder), f"--max_iters={steps}"]
        uninterrupted, killed = folder / "uninterrupted", folder / "killed"
        assert start("train.py", *options, f"--out_dir={uninterrupted}").wait() == 0
        while kills < total:
            while _saved(killed) < steps and kills < total:
                _kill(start("train.py", *options, f"--out_dir={killed}", "--resume"), rng)
                kills += 1
                saved, loadable_count = count_checkpoints(killed)
                assert loadable_count == saved, (
                    f"{saved - loadable_count} damaged checkpoints after kill {kills}"
                )
                files += saved
                lost = max(lost, _reached(killed) - _saved(killed))
                assert lost <= SAVE_INTERVAL, (
                    f"kill {kills} lost {lost} steps, saved every {SAVE_INTERVAL}"
                )
            assert start("train.py", *options, f"--out_dir={killed}", "--resume").wait() == 0
            runs += 1
            assert same_runs(uninterrupted, killed), (
                f"run {runs} differs from the uninterrupted one"
            )
            shutil.rmtree(killed)
    return (
        f"{kills} kills in {runs} runs: {runs} of {runs} end bit-identical to an uninterrupted "
        f"run; at most {lost} steps lost with a save every {SAVE_INTERVAL} steps; 0 of {files} "
        "checkpoints damaged"
    )


def _kill(process: subprocess.Popen, rng: random.Random) -> None:
    """Kill a run at a random moment: while it starts, one time in ten, or else while it trains."""
    if rng.random() < 0.1:
        time.sleep(rng.uniform(0, 3))
    else:
        next(line for line in process.stdout if line.startswith("device "))
        time.sleep(rng.uniform(0, 0.5))
    process.kill()
    process.communicate()
    assert process.returncode in (-9, 0), f"exit code {process.returncode}"


def _reached(folder: Path) -> int:
    """Return the last logged step; every step is logged."""
    steps = [step for step, _ in scalars(folder).get("train/loss", [(0, 0.0)])]
    return steps[-1] if steps else 0


def _saved(folder: Path) -> int:
    return step_of(folder) if (folder / "last.safetensors").exists() else 0


if __name__ == "__main__":
    run_campaign(campaign)
