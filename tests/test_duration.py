"""The length of a run: --minutes."""

import re
import signal
from dataclasses import astuple

import pytest

from common.console import ConfigError
from configs.command import parse_train
from configs.schema import Config, DataConfig, settings_by_name
from storage.checkpoint import LAST, load_checkpoint
from tests.conftest import ROOT
from tests.runs import at_step, same_runs, small_run_args, train
from train import lr_multiplier, measure_timing, train_step
from training.duration import EVALUATION_FRACTION, SAFETY, Timing, settings_for_minutes


def fitted(settings: Config, timing: Timing, seconds: float, val_chars: int) -> Config:
    """Return the settings of a run of `seconds` after its start, and check what they promise."""
    minutes = (seconds + timing.start) / 60
    chosen = settings_for_minutes(minutes, settings, timing, val_chars)
    train, wanted = chosen.train, min(val_chars, settings.data.max_val_chars or val_chars)
    evaluated = min(wanted, chosen.data.max_val_chars or wanted)
    evaluation = timing.samples + timing.character * evaluated
    evaluations = -(-train.max_iters // train.eval_interval)
    planned, limit = timing.step * train.max_iters + evaluation * evaluations, SAFETY * seconds
    # the time is filled, and a tenth of it is enough for the evaluations
    assert limit - timing.step - evaluation <= planned <= limit + evaluation
    assert evaluation * evaluations <= EVALUATION_FRACTION * limit + 1e-9
    # fewer evaluations come before less text
    assert evaluated == wanted or evaluations == 1
    return chosen


def test_minutes_of_every_recipe():
    """The schedule has the same shares of the time as in the recipe."""
    for path in sorted(ROOT.glob("configs/*.yaml")):
        for minutes in (0.1, 5):
            settings = parse_train([str(path), f"--minutes={minutes}"]).config
            train = fitted(settings, Timing(2, 0.1, 0.2, 1e-6), 60 * minutes, 10**5).train
            assert 20 < train.max_iters * 0.1 / minutes < 60
            steps = [lr_multiplier(step, train) for step in range(train.max_iters)]
            assert max(steps) == 1 and min(steps) > 0
            if train.schedule == "wsd":
                peak = sum(multiplier == 1 for multiplier in steps) / train.max_iters
                shares = 1 - train.warmup_ratio - train.cooldown_ratio
                assert peak == pytest.approx(shares, abs=3 / train.max_iters)


@pytest.mark.parametrize(
    ("seconds", "character", "max_val_chars", "evaluations", "chosen"),
    [
        (600, 1e-6, 250_000, 10, 250_000), (600, 1e-6, 0, 10, 0), (600, 1e-4, 250_000, 2, 250_000),
        (60, 1e-4, 250_000, 1, 55_600), (60, 1e-4, 0, 1, 55_600), (60, 1e-4, 30_000, 1, 30_000),
    ],
)  # fmt: skip
def test_minutes_on_a_long_text(seconds, character, max_val_chars, evaluations, chosen, capsys):
    """Evaluations are rarer, then of less text, with a note that losses are not comparable."""
    settings = Config(data=DataConfig(max_val_chars=max_val_chars))
    settings = fitted(settings, Timing(9, 0.1, 0.2, character), seconds, 10**6)
    assert settings.data.max_val_chars == pytest.approx(chosen, abs=1)
    assert -(-settings.train.max_iters // settings.train.eval_interval) == evaluations
    line, _, note = capsys.readouterr().out.rstrip("\n").partition("\n")
    counts = f"{settings.train.max_iters:,} steps of 0.100 s, {evaluations} evaluation"
    assert line.startswith(f"--minutes={(seconds + 9) / 60:g}: {counts}")
    if chosen != max_val_chars:
        assert line.endswith(f" s, with --max_val_chars={settings.data.max_val_chars}")
        assert note == "note: losses compare only at the same max_val_chars"


@pytest.mark.parametrize("timing", [(30, 40, 1, 1e-5), (70, 1, 1, 1e-5), (30, 1, 50, 1e-5)])
def test_minutes_too_few(timing):
    """For the start, a step, or an evaluation: what is enough is said before anything is saved."""
    with pytest.raises(ConfigError, match=r"^--minutes=1 is too short for .* is enough$") as error:
        settings_for_minutes(1, Config(), Timing(*timing), 10**6)
    enough = float(re.search(r"; --minutes=([\d.]+) ", str(error.value))[1])
    settings = settings_for_minutes(enough, Config(), Timing(*timing), 10**6)
    assert settings.train.max_iters > 1


@pytest.fixture
def options(tmp_path):
    """The small run, without its length."""
    chosen = ("--max_iters", "--eval_interval")
    words = [word for word in small_run_args(tmp_path) if not word.startswith(chosen)]
    return [*words, "--dropout=auto", "--n_embd=32"]  # it can memorize


def test_minutes_equal_the_chosen_length(options, tmp_path, monkeypatch):
    """They are timed with the dropout of a long run; a resume keeps the length."""
    stopped, whole, dropouts = tmp_path / "stopped", tmp_path / "whole", []

    def timing(*arguments):
        measured = measure_timing(*arguments)
        assert min(astuple(measured)) > 0
        # only now: the steps of the timing are numbered from 0 too
        at_step(patch, 19, lambda: signal.raise_signal(signal.SIGTERM))
        return Timing(start=1, step=0.1, samples=0.5, character=1e-4)

    def recorded_step(run):
        dropouts.append(run.settings.model.dropout)
        return train_step(run)

    words = [*options, "--max_val_chars=100"]
    with monkeypatch.context() as patch:
        patch.setattr("train.measure_timing", timing)
        patch.setattr("train.train_step", recorded_step)
        code, output = train(*words, "--minutes=0.1", f"--out_dir={stopped}")
    assert code == 143 and dropouts[0] == 0.3, output
    line = r" on; an evaluation predicts about (\d+) characters, evenly spaced\n"
    chars = re.search(line, output)
    steps = re.search(r"--minutes=0\.1: (\d+) steps of", output)
    settings = settings_by_name(load_checkpoint(stopped / LAST).settings)
    lengths = {name: settings[name] for name in ("max_iters", "eval_interval", "max_val_chars")}
    assert str(lengths["max_iters"]) == steps[1] and str(lengths["max_val_chars"]) == chars[1]

    code, output = train(*words, "--minutes=0.2", f"--out_dir={stopped}", "--resume")
    assert code == 0 and f"resuming {stopped} at step 20 of {steps[1]} with its own" in output
    words += [f"--{name}={value}" for name, value in lengths.items()]
    assert train(*words, f"--out_dir={whole}")[0] == 0
    assert same_runs(stopped, whole)
