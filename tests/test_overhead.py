"""The benchmark of the overhead of logging and checkpoints."""

import re
from types import SimpleNamespace

import pytest

from benchmarks import overhead
from tests.runs import small_run_args, train


def test_logging_overhead_is_the_share_of_time_outside_the_steps_of_intervals_without_evaluation():
    speeds = [(0, 0.0, 50), (10, 4.0, 50), (20, 100.0, 50), (30, 106.0, 100)]
    tags = {
        "train/tokens_per_sec": [
            SimpleNamespace(step=step, wall_time=seconds, value=speed)
            for step, seconds, speed in speeds
        ],
        "val/loss": [SimpleNamespace(step=10)],  # so the interval from 10 to 20 does not count
    }
    events = SimpleNamespace(Scalars=tags.__getitem__)
    # 4 + 6 s in all, of which 10 steps at 50 and 10 at 100 tokens per second take 2 + 1 s
    assert overhead.logging_overhead(events, per_step=10) == pytest.approx(0.7)


def test_a_finished_run_can_be_measured(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    lengths = ["--max_iters=12", "--eval_interval=6", "--log_interval=1"]
    assert train(*small_run_args(tmp_path), *lengths, f"--out_dir={folder}")[0] == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["overhead", str(folder)])
    overhead.main()
    saved, loaded, saves = re.search(
        r"saved in (\S+) s, loaded in (\S+) s; at most (\d+) saves", capsys.readouterr().out
    ).groups()
    assert float(saved) > 0 and float(loaded) > 0
    assert saves == "4"  # of the best and the last, at each of two evaluations
