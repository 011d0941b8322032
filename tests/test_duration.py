"""The length of a run: --minutes."""

import math
import re
from dataclasses import astuple
from unittest.mock import Mock

import pytest

from common.console import ConfigError
from configs.schema import Config, DataConfig
from tests.runs import same_runs, step_of, train
from train import measure_timing, train_step
from training.duration import Timing, settings_for_minutes


@pytest.mark.parametrize(
    ("minutes", "character", "max_val_chars", "evaluations", "chosen"),
    [
        (10, 1e-6, 250_000, 10, 250_000),
        (10, 1e-4, 250_000, 2, 250_000),
        (1, 1e-4, 250_000, 1, 46_960),
        (1, 1e-4, 0, 1, 46_960),
    ],
)
def test_minutes_are_filled(minutes, character, max_val_chars, evaluations, chosen, capsys):
    """A tenth, at most, by evaluations: they are rarer, then of less text, with a note."""
    settings = Config(data=DataConfig(max_val_chars=max_val_chars))
    timing = Timing(start=9, step=0.1, samples=0.2, character=character)
    settings = settings_for_minutes(minutes, settings, timing, val_chars=10**6)
    max_iters, interval = settings.train.max_iters, settings.train.eval_interval
    assert math.ceil(max_iters / interval) == evaluations
    assert settings.data.max_val_chars == pytest.approx(chosen, abs=1)
    seconds = evaluations * (timing.samples + character * chosen)
    assert seconds <= 6 * minutes
    assert 57 * minutes < timing.start + timing.step * max_iters + seconds < 60 * minutes
    note = "note: losses compare only at the same max_val_chars\n"
    assert (note in capsys.readouterr().out) == (chosen != max_val_chars)


@pytest.mark.parametrize("timing", [(30, 40, 1, 1e-5), (70, 1, 1, 1e-5), (30, 1, 50, 1e-5)])
def test_minutes_too_few(timing):
    """For the start, a step, or an evaluation: what is enough is said before anything is saved."""
    with pytest.raises(ConfigError, match=r"^--minutes=1 is too short for ") as error:
        settings_for_minutes(1, Config(), Timing(*timing), 10**6)
    enough = float(re.search(r"; --minutes=([\d.]+) is enough$", str(error.value))[1])
    assert settings_for_minutes(enough, Config(), Timing(*timing), 10**6).train.max_iters > 1


def test_minutes_choose_the_length(options, tmp_path, monkeypatch):
    """The run is that of the length which is printed; a resume keeps it."""
    recorded = Mock(wraps=train_step)

    def timing(*arguments):
        assert min(astuple(measure_timing(*arguments))) > 0
        return Timing(start=1, step=0.1, samples=0.2, character=1e-3)

    timed, whole = f"--out_dir={tmp_path / 'timed'}", f"--out_dir={tmp_path / 'whole'}"
    monkeypatch.setattr("train.measure_timing", timing)
    monkeypatch.setattr("train.train_step", recorded)
    words = [word for word in options if not word.startswith(("--max_iters", "--eval_interval"))]
    words += ["--dropout=auto", "--n_embd=32"]  # it can memorize
    code, output = train(*words, timed, "--minutes=0.1")
    assert code == 0, output
    (probe,) = recorded.call_args_list[0].args
    assert probe.settings.model.dropout == 0.3  # that of a long run: its steps take longer
    line = r"--minutes=0\.1: (\d+) steps of .*, 1 evaluation of .* with --max_val_chars=(\d+)\n"
    steps, chars = re.search(line, output).groups()
    assert f"; an evaluation predicts about {chars} characters, evenly spaced\n" in output
    length = [f"--max_iters={steps}", f"--eval_interval={steps}", f"--max_val_chars={chars}"]
    assert train(*words, whole, *length)[0] == 0
    assert same_runs(tmp_path / "timed", tmp_path / "whole")
    assert train(*words, timed, "--minutes=9", "--resume")[0] == 0
    assert step_of(tmp_path / "timed") == int(steps)
