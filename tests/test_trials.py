"""The campaign of trials: a table of settings in, a table of losses out, and no run twice."""

import json
from contextlib import nullcontext

import pytest

from benchmarks import trials
from checkpointing.checkpoint import METRICS
from tests.runs import scalars, small_run_args

LOSSES = {"--beta2=0.9": 1.5, "--beta2=0.99": 1.25}


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """Run `trials` on a small table with runs that only record their command lines."""
    table, runs = tmp_path / "table.json", []
    settings = {"short": ["--beta2=0.9"], "long": ["--beta2=0.99"]}
    table.write_text(json.dumps({"train.py": ["configs/fast.yaml"], "trials": settings}))

    def run_training(*command):
        runs.append(command)
        loss = LOSSES[command[1]] + (command[2] == "--seed=2") / 8
        return trials.Result(loss=loss, minutes=4.0)

    monkeypatch.setattr(trials, "run_training", run_training)
    return lambda *arguments: trials.main([str(table), *arguments]), runs


def test_table(campaign, capsys):
    run, runs = campaign
    run("--seeds", "1", "2")
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| short | 1.5625 | 1.5000 to 1.6250 | 4.0 |",
        "| long | 1.3125 | 1.2500 to 1.3750 | 4.0 |",
    ]
    assert runs[0] == ("configs/fast.yaml", "--beta2=0.9", "--seed=1")


def test_a_result_is_the_last_evaluation_in_metrics_csv(monkeypatch, tmp_path):
    folder = nullcontext(tmp_path)
    monkeypatch.setattr(trials.tempfile, "TemporaryDirectory", lambda: folder)
    result = trials.run_training(*small_run_args(tmp_path))
    (*_, (_, loss)) = scalars(tmp_path / "run")["val/loss"]
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert f",{result.minutes:.3f}," in (tmp_path / "run" / METRICS).read_text().splitlines()[-1]


def test_finished_runs_are_not_repeated(campaign, capsys):
    run, runs = campaign
    run("long")
    first = capsys.readouterr().out
    run()
    assert runs == [
        ("configs/fast.yaml", "--beta2=0.99", "--seed=1337"),
        ("configs/fast.yaml", "--beta2=0.9", "--seed=1337"),
    ]
    assert first.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]


def test_results_of_an_interrupted_campaign_stay(campaign, monkeypatch):
    run, runs = campaign
    record = trials.run_training

    def interrupted(*command):
        if "--beta2=0.99" in command:
            raise KeyboardInterrupt
        return record(*command)

    monkeypatch.setattr(trials, "run_training", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(trials, "run_training", record)
    run()
    assert [command[1] for command in runs] == ["--beta2=0.9", "--beta2=0.99"]


def test_unknown_trial(campaign, capsys):
    run, runs = campaign
    with pytest.raises(SystemExit, match="2"):
        run("medium")
    assert "medium: not in " in capsys.readouterr().err
    assert not runs
