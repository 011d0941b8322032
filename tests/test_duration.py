"""The length of a run: --minutes."""

import re
import signal
import time
from types import SimpleNamespace

import pytest

from configs.command import parse_train
from configs.schema import Config, TrainConfig
from storage.checkpoint import LAST, load_checkpoint
from tests.conftest import ROOT
from tests.runs import at_step, same_runs, small_run_args, train
from train import lr_multiplier, train_step
from training import duration
from training.distributed import World
from training.duration import EVALUATION_FRACTION, SAFETY, Timing, train_config_for


def test_minutes_of_every_recipe():
    """The schedule has the same shares of the time as in the recipe."""
    for path in sorted(ROOT.glob("configs/*.yaml")):
        for minutes in (0.05, 5):
            settings = parse_train([str(path), f"--minutes={minutes}"]).config.train
            fitted = train_config_for(settings, Timing(step=0.1, evaluation=0.3), 60 * minutes)
            assert 20 < fitted.max_iters * 0.1 / minutes < 60
            steps = [lr_multiplier(step, fitted) for step in range(fitted.max_iters)]
            assert max(steps) == 1 and min(steps) > 0
            if settings.schedule == "wsd":
                peak = sum(multiplier == 1 for multiplier in steps) / fitted.max_iters
                shares = 1 - settings.warmup_ratio - settings.cooldown_ratio
                assert peak == pytest.approx(shares, abs=3 / fitted.max_iters)


@pytest.mark.parametrize("seconds", [1, 60, 600, 36000])
@pytest.mark.parametrize("evaluation", [0, 0.5, 20])
@pytest.mark.parametrize("interval", ["auto", 50])
def test_minutes_are_filled_not_exceeded(seconds, evaluation, interval):
    fitted = train_config_for(TrainConfig(eval_interval=interval), Timing(0.2, evaluation), seconds)
    n = fitted.max_iters
    evaluations = -(-n // fitted.eval_interval)
    planned, limit = 0.2 * n + evaluation * evaluations, SAFETY * seconds
    assert n == 1 or limit - 0.2 - evaluation <= planned <= limit + evaluation
    assert evaluations == 1 or evaluation * evaluations <= EVALUATION_FRACTION * seconds
    if evaluation == 0:
        assert fitted.eval_interval == -(-n // 10)


@pytest.mark.parametrize("seconds", [10, 0.1])
def test_minutes_include_the_start(seconds, monkeypatch, capsys):
    """The line names what shortens the evaluations."""
    monkeypatch.setattr(duration, "measure_timing", lambda *_: Timing(0.1, seconds))
    make_run = lambda settings: SimpleNamespace(world=World())  # noqa: E731
    began = time.monotonic() - 30
    train = duration.settings_for_minutes(1, began, Config(), make_run, train_step).train
    assert 200 < train.max_iters + 10 * seconds <= SAFETY * 300
    assert capsys.readouterr().out == (
        f"--minutes=1: {train.max_iters} steps of 0.100 s, and evaluations of {seconds:.1f} s; "
        "a smaller --max_val_chars shortens them\n"
    )


@pytest.fixture
def options(tmp_path):
    """The small run, without its length."""
    chosen = ("--max_iters", "--eval_interval")
    words = [word for word in small_run_args(tmp_path) if not word.startswith(chosen)]
    return [*words, "--dropout=auto", "--n_embd=32"]  # it can memorize


def lengths_of(run):
    """Return the options of the length that --minutes has chosen."""
    train = load_checkpoint(run / LAST).settings.train
    return [f"--max_iters={train.max_iters}", f"--eval_interval={train.eval_interval}"]


def test_minutes_equal_the_printed_max_iters(options, tmp_path):
    timed, repeated = tmp_path / "timed", tmp_path / "repeated"
    code, output = train(*options, "--minutes=0.01", f"--out_dir={timed}")
    assert code == 0
    printed = re.search(r"--minutes=0\.01: ([\d,]+) steps? of", output)[1].replace(",", "")
    assert lengths_of(timed)[0] == f"--max_iters={printed}"
    assert train(*options, *lengths_of(timed), f"--out_dir={repeated}")[0] == 0
    assert same_runs(timed, repeated)


def test_minutes_of_a_stopped_run(options, tmp_path, monkeypatch):
    """It keeps its length, whatever resumes it."""
    stopped, whole, trials = tmp_path / "stopped", tmp_path / "whole", []

    def measure_timing(probe_run, *_):
        trials.append(probe_run.settings.model.dropout)
        return Timing(step=0.1, evaluation=0.6)

    monkeypatch.setattr("training.duration.measure_timing", measure_timing)
    with monkeypatch.context() as patch:
        at_step(patch, 19, lambda: signal.raise_signal(signal.SIGTERM))
        code, output = train(*options, "--minutes=0.1", f"--out_dir={stopped}")
    assert code == 143 and trials == [0.3]  # timed with the dropout of a long run
    lengths = lengths_of(stopped)
    code, output = train(*options, "--minutes=9", f"--out_dir={stopped}", "--resume")
    max_iters = lengths[0].partition("=")[2]
    assert code == 0 and f"resuming {stopped} at step 20 of {max_iters} with its own" in output
    assert train(*options, *lengths, f"--out_dir={whole}")[0] == 0
    assert same_runs(stopped, whole)
