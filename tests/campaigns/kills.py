"""Campaign: kill -9 at random moments, and resume until the run is done.

    python -m tests.campaigns.kills [--full]

Each run must end bit-identical to an uninterrupted run.
"""

import random
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.common import (
    count_checkpoints,
    resume_if_saved,
    run_campaign,
    same_runs,
    scalars,
    small_run_args,
    start,
    step_of,
)

SAVE_INTERVAL = 4
# The small run has Muon, dropout, accumulation and pictures; the full form changes them in turn.
MIXES = [
    [],
    ["--optimizer=adamw", "--schedule=cosine"],
    ["--dropout=0", "--attention_dropout=0.3", "--gradient_accumulation_steps=1"],
    ["--dtype=bfloat16", "--optimizer=adamw", "--positions=rope", "--qk_norm"],
    ["--log=scalars", "--schedule=constant", "--attention=stacked", "--kernel=batched"],
]


def campaign(full: bool) -> str:
    wanted, steps, mixes = (200, 600, MIXES) if full else (3, 100, MIXES[:1])
    totals = Totals()
    with tempfile.TemporaryDirectory() as name:
        for number, mix in enumerate(mixes):
            folder = Path(name, str(number))
            folder.mkdir()
            options = [*small_run_args(folder), f"--max_iters={steps}", *mix]
            _kill_and_compare(folder, options, steps, wanted // len(mixes), totals)
    with_mixes = f" with {len(mixes)} mixes of settings" * full
    return (
        f"{totals.kills} kills in {totals.runs} runs{with_mixes}: {totals.runs} of {totals.runs} "
        f"end bit-identical to an uninterrupted run; at most {totals.lost} steps lost with a save "
        f"every {SAVE_INTERVAL} steps; 0 of {totals.files} checkpoints damaged"
    )


@dataclass
class Totals:
    """The counts of a campaign, and the random numbers of its kills."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    kills: int = 0
    runs: int = 0
    lost: int = 0
    files: int = 0


def _kill_and_compare(
    folder: Path, options: list[str], steps: int, wanted: int, totals: Totals
) -> None:
    """Kill and resume runs, `wanted` times in all; each must end as the uninterrupted one."""
    uninterrupted, killed, kills = folder / "uninterrupted", folder / "killed", 0
    assert start("train.py", *options, f"--out_dir={uninterrupted}").wait() == 0
    while kills < wanted:
        while _saved(killed) < steps and kills < wanted:
            resume = resume_if_saved(killed)
            _kill(start("train.py", *options, f"--out_dir={killed}", *resume), totals.rng)
            kills += 1
            saved, loaded = count_checkpoints(killed)
            assert loaded == saved, f"{saved - loaded} damaged checkpoints after kill {kills}"
            totals.files += saved
            totals.lost = max(totals.lost, _reached(killed) - _saved(killed))
            assert totals.lost <= SAVE_INTERVAL, (
                f"kill {kills} lost {totals.lost} steps, saved every {SAVE_INTERVAL}"
            )
        resume = resume_if_saved(killed)
        assert start("train.py", *options, f"--out_dir={killed}", *resume).wait() == 0
        totals.runs += 1
        assert same_runs(uninterrupted, killed), (
            f"{options}: a run differs from the uninterrupted one"
        )
        shutil.rmtree(killed)
    totals.kills += kills


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
