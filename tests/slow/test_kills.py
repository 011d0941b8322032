"""kill -9: a run loses the steps since its last save, and ends as if it had not been killed.

KILLS=200 python -m pytest tests/slow/test_kills.py    # a campaign
"""

import os
import random
import time

from tests.runs import count_checkpoints, same_runs, scalars, small_run_args, start, step_of, train

KILLS = int(os.environ.get("KILLS", "1"))


def test_killed_run_ends_as_an_unkilled_one(tmp_path):
    whole, killed, draw = tmp_path / "whole", tmp_path / "killed", random.Random(KILLS)
    options = [*small_run_args(tmp_path), f"--max_iters={200 * KILLS}"]
    for _ in range(KILLS):
        process = start("train.py", *options, f"--out_dir={killed}", "--resume")
        next(line for line in process.stdout if line.startswith(("speed ", "step ")))
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        process.communicate()
        assert process.returncode == -9 and count_checkpoints(killed)  # all are whole
        reached = max(step for step, _ in scalars(killed)["train/loss"])
        assert reached - step_of(killed) <= 6  # it is saved at evaluations
    time.sleep(1)  # TensorBoard's files are in the order of their seconds, then of the processes
    assert train(killed)[0] == train(*options, f"--out_dir={whole}")[0] == 0
    assert same_runs(whole, killed)
