"""The campaign of losses against minutes: its runs, its table and its picture."""

import xml.etree.ElementTree as ET

import pytest

from benchmarks import minutes
from benchmarks.time_to_loss import TrainingResult


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """Run `minutes` with training commands that are only recorded; also return these and the SVG.

    A recorded run of m minutes takes 60 m seconds; nanoGPT starts in 3 s and makes 20 steps/s.
    """
    runs, picture = [], tmp_path / "minutes.svg"

    def run_training(config, option):
        runs.append((config, option))
        planned = float(option.removeprefix("--minutes="))
        return TrainingResult(60 * planned, 50 * planned, 1.9 - 0.01 * planned)

    def run_nanogpt_training(folder, compiled, max_iters):
        runs.append((folder.name, max_iters))
        return TrainingResult(3 + max_iters / 20, max_iters / 20, 1.75)

    monkeypatch.setattr(minutes, "run_training", run_training)
    monkeypatch.setattr(minutes, "run_nanogpt_training", run_nanogpt_training)
    monkeypatch.setattr(minutes, "PICTURE", picture)
    results = str(tmp_path / "results.jsonl")
    return lambda *arguments: minutes.main([results, *arguments]), runs, picture


def test_every_config_is_trained_for_every_number_of_minutes(campaign):
    run, runs, _ = campaign
    run()
    assert len(runs) == 18
    assert runs[:3] == [(config, "--minutes=0.5") for config in minutes.CONFIGS]
    assert runs[-1] == ("configs/best.yaml", "--minutes=30")


def test_nanogpt_gets_the_steps_that_fit(campaign):
    run, runs, _ = campaign
    run("--nanogpt=somewhere", "--minutes", "1", "2", "5", "--configs")
    assert runs == [
        *(("somewhere", steps) for steps in (250, 750, 20 * (60 - 3))),
        *(("somewhere", steps) for steps in (250, 750, 20 * (300 - 3))),
    ]


def test_finished_runs_are_not_repeated_and_stay_in_table_and_picture(campaign, capsys):
    run, runs, picture = campaign
    run("--minutes", "5", "--configs", "configs/best.yaml")
    run("--nanogpt=somewhere", "--minutes", "1", "5", "--configs", "configs/best.yaml")
    assert runs.count(("configs/best.yaml", "--minutes=5")) == 1
    table = capsys.readouterr().out.splitlines()[-4:]
    assert table == [
        "| nanoGPT | 1 | 1.00 | 1.7500 |",
        "| nanoGPT | 5 | 5.00 | 1.7500 |",
        "| best.yaml | 1 | 1.00 | 1.8900 |",
        "| best.yaml | 5 | 5.00 | 1.8500 |",
    ]
    shapes = list(ET.fromstring(picture.read_text(encoding="utf-8")))
    lines = [shape.get("points") for shape in shapes if shape.get("stroke") == minutes.RED]
    assert len(lines) == 2 and len(lines[0].split()) == 2  # the curve, and the legend's
