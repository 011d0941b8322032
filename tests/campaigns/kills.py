"""kill -9 at random moments, resume, until done: python -m tests.campaigns.kills [--full]

Each run is killed and resumed until it reaches its end, which must be that of a run that nobody
disturbed.
"""

import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.campaigns.common import command, loadable, same, scalars, small, start, step_of

SAVE_INTERVAL = 4


def campaign(full: bool) -> str:
    wanted, steps = (200, 600) if full else (3, 100)
    chance, kills, runs, lost, files = random.Random(0), 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*small(folder), f"--max_iters={steps}"]
        undisturbed, killed = folder / "undisturbed", folder / "killed"
        assert start("train.py", *options, f"--out_dir={undisturbed}").wait() == 0
        while kills < wanted:
            while _saved(killed) < steps and kills < wanted:
                _kill(start("train.py", *options, f"--out_dir={killed}", "--resume"), chance)
                kills += 1
                there, good = loadable(killed)
                assert good == there, f"{there - good} unloadable files after kill {kills}"
                files += there
                lost = max(lost, _reached(killed) - _saved(killed))
                assert lost <= SAVE_INTERVAL, (
                    f"kill {kills} lost {lost} steps, saved every {SAVE_INTERVAL}"
                )
            assert start("train.py", *options, f"--out_dir={killed}", "--resume").wait() == 0
            runs += 1
            assert same(undisturbed, killed), f"run {runs} does not end as the undisturbed one"
            shutil.rmtree(killed)
    return (
        f"{kills} kills in {runs} runs: {runs} of {runs} end to the last bit as the undisturbed "
        f"run; "
        f"at most {lost} steps lost, saved every {SAVE_INTERVAL}; 0 of {files} files unloadable"
    )


def _kill(process: subprocess.Popen, chance: random.Random) -> None:
    """At some moment of its start, one time in ten, or else of its training."""
    if chance.random() < 0.1:
        time.sleep(chance.uniform(0, 3))
    else:
        next(line for line in process.stdout if line.startswith("first loss"))
        time.sleep(chance.uniform(0, 0.5))
    process.kill()
    process.communicate()
    assert process.returncode in (-9, 0), f"exit code {process.returncode}"


def _reached(folder: Path) -> int:
    """The last step that was logged, which is every step."""
    steps = [step for step, _ in scalars(folder).get("train/loss", [(0, 0.0)])]
    return steps[-1] if steps else 0


def _saved(folder: Path) -> int:
    return step_of(folder) if (folder / "last.safetensors").exists() else 0


if __name__ == "__main__":
    command(campaign)
