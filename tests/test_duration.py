"""The length of a run: shares of max_iters, and --minutes."""

import re
import time
from types import SimpleNamespace

import pytest

from configs.command import parse_train
from configs.schema import Config, TrainConfig
from tests.conftest import ROOT
from tests.runs import contents, same_runs, send_at, small_run_args, train
from training import duration
from training.distributed import World
from training.duration import EVALUATION_FRACTION, SAFETY, Timing, longest_run
from training.schedule import lr_multiplier


@pytest.mark.parametrize("minutes", [0.05, 5])
@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_trains_for_any_time(path, minutes):
    settings = parse_train([str(path), f"--minutes={minutes}"]).new_settings().train
    fitted = longest_run(settings, Timing(step=0.1, evaluation=0.3), 60 * minutes)
    assert 20 < fitted.max_iters * 0.1 / minutes < 60
    steps = [lr_multiplier(step, fitted) for step in range(fitted.max_iters)]
    assert max(steps) == 1 and min(steps) > 0
    if settings.schedule == "trapezoid":  # the same shares of the time as in the recipe
        peak = sum(multiplier == 1 for multiplier in steps) / fitted.max_iters
        shares = 1 - settings.warmup_ratio - settings.cooldown_ratio
        assert peak == pytest.approx(shares, abs=3 / fitted.max_iters)


@pytest.mark.parametrize("seconds", [1, 60, 600, 36000])
@pytest.mark.parametrize("evaluation", [0, 0.5, 20])
@pytest.mark.parametrize("interval", ["auto", 50])
def test_minutes_are_filled_but_not_exceeded(seconds, evaluation, interval):
    fitted = longest_run(TrainConfig(eval_interval=interval), Timing(0.2, evaluation), seconds)
    n = fitted.max_iters
    evaluations = -(-n // fitted.eval_interval)
    planned, limit = 0.2 * n + evaluation * evaluations, SAFETY * seconds
    assert n == 1 or limit - 0.2 - evaluation <= planned <= limit + evaluation
    assert evaluations == 1 or evaluation * evaluations <= EVALUATION_FRACTION * seconds
    if evaluation == 0:
        assert fitted.eval_interval == (-(-n // 10) if interval == "auto" else interval)


@pytest.fixture
def options(tmp_path):
    """The small run, without its length."""
    words = [word for word in small_run_args(tmp_path) if "max_iters" not in word]
    return [*words, "--eval_interval=auto", "--dropout=auto", "--n_embd=32"]  # it can memorize


def chosen(output):
    """Return the number of steps that --minutes has chosen, from the output of a run."""
    return int(re.search(r"--minutes=\S+: ([\d,]+) steps?", output)[1].replace(",", ""))


def test_a_run_of_so_many_minutes_is_that_of_the_max_iters_it_prints(options, tmp_path):
    timed, repeated = tmp_path / "timed", tmp_path / "repeated"
    code, output = train(*options, "--minutes=0.01", f"--out_dir={timed}")
    assert code == 0
    settings = contents(timed / "last.safetensors")["settings"]["train"]
    again = [f"--max_iters={chosen(output)}", f"--eval_interval={settings['eval_interval']}"]
    assert train(*options, *again, f"--out_dir={repeated}")[0] == 0
    assert same_runs(timed, repeated)


def test_the_minutes_include_those_that_the_start_has_taken(monkeypatch):
    monkeypatch.setattr(duration, "measure_timing", lambda probe_run, seconds: Timing(0.1, 0))
    began = time.monotonic() - 30
    settings, _ = duration.settings_for_minutes(
        1, began, Config(), lambda settings: SimpleNamespace(world=World())
    )
    assert 200 < settings.train.max_iters <= SAFETY * 300


def test_a_run_with_minutes_that_was_stopped_keeps_its_length_whatever_resumes_it(
    options, tmp_path, monkeypatch
):
    stopped, uninterrupted, trials = tmp_path / "stopped", tmp_path / "uninterrupted", []

    def measure_timing(probe_run, _):
        trials.append(probe_run.settings.model.dropout)
        return Timing(step=0.1, evaluation=0.6)

    monkeypatch.setattr("training.duration.measure_timing", measure_timing)
    with monkeypatch.context() as patch:
        send_at("step", "SIGTERM", 20, patch.setattr)
        code, output = train(*options, "--minutes=0.1", f"--out_dir={stopped}")
    assert code == 143 and trials == [0.3]  # timed with the dropout of a long run
    max_iters = chosen(output)
    assert max_iters <= 57
    code, output = train(*options, "--minutes=9", f"--out_dir={stopped}", "--resume")
    assert code == 0 and f"--minutes: the run keeps its {max_iters} steps\n" in output
    lengths = [f"--max_iters={max_iters}", f"--eval_interval={max_iters}"]  # they are slow: one
    words = [word for word in options if "eval_interval" not in word]
    assert train(*words, *lengths, f"--out_dir={uninterrupted}")[0] == 0
    assert same_runs(stopped, uninterrupted)
