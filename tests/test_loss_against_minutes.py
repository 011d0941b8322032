"""The campaign of losses against minutes: its runs, its table and its picture."""

import subprocess
import xml.etree.ElementTree as ET

import pytest
import torch

from benchmarks import charts, minutes, time_to_loss
from benchmarks.time_to_loss import TrainingResult
from tests.conftest import ROOT, shapes

SVG = "{http://www.w3.org/2000/svg}"
BEST = "configs/best.yaml"


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """Return a function that runs `minutes`, the list of its training runs, and its picture's path.

    The runs are only recorded. One of m minutes takes 60 m + 6 seconds. nanoGPT starts in 3 s and
    makes 20 steps a second.
    """
    runs = []

    def run_training(config, option, *text):
        runs.append((config, option, *text))
        planned = float(option.removeprefix("--minutes="))
        return TrainingResult(60 * planned + 6, 50 * planned, 1.9 - 0.01 * planned)

    def run_nanogpt_training(folder, max_iters):
        runs.append(("nanoGPT", max_iters))
        return TrainingResult(3 + max_iters / 20, max_iters / 20, 1.75)

    monkeypatch.setattr(minutes, "run_training", run_training)
    monkeypatch.setattr(minutes, "run_nanogpt_training", run_nanogpt_training)
    minutes.nanogpt_speed.cache_clear()
    results = tmp_path / "results.jsonl"

    def run(*arguments):
        minutes.main([str(results), *arguments])

    return run, runs, results.with_suffix(".svg")


def test_nanogpt_gets_the_steps_that_fit_and_reads_the_same_text(campaign, tmp_path):
    run, runs, _ = campaign
    run(f"--nanogpt={tmp_path}", "--minutes", "1", "5", "--configs", BEST)
    text = f"--data.sources={tmp_path}/data/shakespeare_char/input.txt"
    assert runs == [
        (BEST, "--minutes=1", text),
        ("nanoGPT", 250),  # these two measure its speed
        ("nanoGPT", 750),
        ("nanoGPT", 1250),  # 20 * (60 - 3) is 1140
        (BEST, "--minutes=5", text),
        ("nanoGPT", 6000),  # 20 * (300 - 3) is 5940
    ]


def test_finished_runs_are_not_repeated_and_stay_in_table_and_picture(campaign, tmp_path, capsys):
    run, runs, picture = campaign
    run("--minutes", "5", "--configs", BEST)
    run(f"--nanogpt={tmp_path}", "--minutes", "10", "1", "5", "--configs", BEST)
    assert [each[1] for each in runs if each[0] == BEST].count("--minutes=5") == 1
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "| nanoGPT | 1 | 1.09 | 1.7500 |",
        "| nanoGPT | 5 | 5.05 | 1.7500 |",
        "| best.yaml | 1 | 1.10 | 1.8900 |",
        "| best.yaml | 5 | 5.10 | 1.8500 |",
        "| best.yaml | 10 | 10.10 | 1.8000 |",
    ]
    marks = ET.fromstring(picture.read_text(encoding="utf-8")).iter(f"{SVG}use")
    dots = [mark for mark in marks if charts.RED in mark.get("style")][:-1]  # without the legend
    assert len(dots) == 3


def test_the_learning_rate_of_nanogpt_falls_over_the_whole_run(monkeypatch, tmp_path):
    def run(command, **_):
        (folder,) = (word.partition("=")[2] for word in command if word.startswith("--out_dir="))
        torch.save({}, f"{folder}/ckpt.pt")
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="iter 1: loss 2, time 10.00ms")

    commands = []
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(time_to_loss, "nanogpt_loss", lambda folder, saved: 1.5)
    result = time_to_loss.run_nanogpt_training(tmp_path, max_iters=750)
    assert {"--max_iters=750", "--lr_decay_iters=750", "--compile=False"} <= set(commands[0])
    assert result.step_seconds == pytest.approx(7.5) and result.loss == 1.5


@pytest.mark.parametrize("name", ["minutes", "minutes_zen4"])
def test_the_pictures_in_the_repository_are_drawn_from_the_results_beside_them(name, tmp_path):
    results, drawn = (ROOT / "docs" / f"{name}.{suffix}" for suffix in ("jsonl", "svg"))
    minutes.draw(minutes.load_runs(results), tmp_path / "again.svg")
    assert shapes(tmp_path / "again.svg") == shapes(drawn)
