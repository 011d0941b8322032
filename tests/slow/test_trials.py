"""Comparing settings: which runs are made, what counts as a difference, and no run is lost."""

import pytest

from benchmarks import trials
from common.console import ConfigError
from configs.command import parse_train
from storage.log import CSV_HEADER, METRICS
from tests.conftest import ROOT

SMOKE = "configs/smoke.yaml"
RATES = "--learning_rate=0.01,0.02"
FIRST, SECOND = "learning_rate=0.01,seed=1", "learning_rate=0.02,seed=1"


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Return a function that compares settings and returns what is printed, and a list of runs.

    A run is only recorded. It fails if it is named in `failing_runs`, with this code and last line.
    """
    runs, failing = [], {}

    def train(run):
        runs.append(run.folder.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        code, line = failing.get(run.folder.name, (0, ""))
        (run.folder / trials.OUTPUT).write_text(f"text\n{line}\n\n")
        rate = float(run.trial.partition("=")[2] or 0)
        rows = f"1,6,,,,4,1,\n60,6,,,,{1.4 + rate + run.seed / 1000},1,\n"
        (run.folder / METRICS).write_text(f"{CSV_HEADER}\n{rows}")
        trials.write_record(run, finished=code == 0)
        return code

    def compare(*arguments, failing_runs=None):
        runs.clear()
        failing.clear()
        failing.update(failing_runs or {})
        trials.main([SMOKE, f"--name={tmp_path}/campaign", *arguments])
        return capsys.readouterr().out

    monkeypatch.setattr(trials, "train", train)
    monkeypatch.chdir(ROOT)
    return compare, runs


def test_trials_combine_values_and_seeds():
    words = [SMOKE, RATES, "--n_layer=1,2", "--max_iters=60", "--seeds=2"]
    runs = trials.parse_trials(words)
    assert [run.seed for run in runs] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [run.trial for run in runs[:2]] == [f"learning_rate=0.01,n_layer={n}" for n in (1, 2)]
    assert len({run.folder for run in runs}) == 8
    command = parse_train(runs[-1].words)
    config = command.config
    assert command.resume  # what was interrupted continues
    assert (config.train.learning_rate, config.model.n_layer, config.seed) == (0.02, 2, 2)
    assert config.train.max_iters == 60


def test_trials_shorten_long_folder_names():
    files = [f"--val_sources={'é' * 150}{n}.txt,data/plays" for n in (1, 2)]
    names = {run.folder.name for file in files for run in trials.parse_trials([SMOKE, file])}
    assert len(names) == 3 and all(len(name.encode()) < 256 for name in names)
    assert sum(name.endswith(",seed=1") for name in names) == 3


@pytest.mark.parametrize(
    "words, message",
    {
        "two words": (["--learning_rate", "0.01,0.02"], "0.01,0.02: write --key=VALUE,VALUE"),
        "seed": (["--seed=7"], "--seed differs from run to run; use --seeds=N"),
        "seed apart": (["--seed", "7"], "--seed differs from run to run; use --seeds=N"),
        "folder": ([RATES, "--out-dir=x"], "--out-dir differs from run to run; use --name=NAME"),
        "no seeds": (["--seeds=0"], "--seeds: at least 1"),
    }.values(),
)
def test_trials_refuse(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        trials.parse_trials([SMOKE, *words])
    assert f"error: {message}" in capsys.readouterr().err


def test_trials_check_all_words_before_any_run(compare):
    run, runs = compare
    with pytest.raises(ConfigError, match="learning_rate must be a number"):
        run("--learning_rate=0.01,fast")
    assert not runs


def test_trials_difference_counts_by_the_rule():
    def counts(a, b):
        by_seed = [
            {seed: trials.Result(loss, 1, 1) for seed, loss in enumerate(losses)}
            for losses in (a, b)
        ]
        (counts,) = {trials.is_difference(*by_seed), trials.is_difference(*by_seed[::-1])}
        return counts

    assert counts([1.41, 1.42], [1.40, 1.41])  # two seeds gain 0.01 each
    assert not counts([1.41, 1.42], [1.40, 1.42])
    assert counts([1.408, 1.409, 1.410], [1.40, 1.401, 1.402])  # the means differ by 0.008
    assert not counts([1.407, 1.408, 1.410], [1.40, 1.401, 1.402])
    assert not counts([1.5], [1.4])  # one seed


def test_trials_table(compare):
    run, _ = compare
    printed = run(RATES, "--seeds=3")
    assert "run 3 of 6: learning_rate=0.01,seed=2\n  loss 1.4120, 6.0 min\n" in printed
    assert (
        "| learning_rate=0.01 | 3 | 1.4120 | 1.4110 to 1.4130 | lowest | 60 | 6.0 |\n"
        "| learning_rate=0.02 | 3 | 1.4220 | 1.4210 to 1.4230 | 0.0100: counts | 60 | 6.0 |\n"
        f"\n{trials.RULE}\n"
    ) in printed


def test_trials_reuse_finished_runs(compare):
    run, runs = compare
    run(RATES)
    assert runs == [FIRST, SECOND]
    printed = run("--learning_rate=0.01,0.02,0.03")
    assert runs == ["learning_rate=0.03,seed=1"]
    assert "| learning_rate=0.02 | 1 | 1.4210 | 1.4210 to 1.4210 | 0.0100: does not" in printed


def test_trials_leave_other_runs_alone(compare):
    run, runs = compare
    run(RATES, "--max_iters=60")
    with pytest.raises(SystemExit, match=r"has the run of .*--max_iters=60.*another --name"):
        run(RATES, "--max_iters=50")
    assert not runs


def test_trials_name_failed_runs_and_try_again(compare, capsys):
    run, runs = compare
    failing = {SECOND: (2, "error: step 7: the loss is nan")}
    with pytest.raises(SystemExit, match=f"failed: {SECOND}: exit code 2: error: step 7: the loss"):
        run(RATES, failing_runs=failing)
    printed = capsys.readouterr().out
    assert "| learning_rate=0.01 | 1 |" in printed and "| learning_rate=0.02 | 1 |" not in printed
    assert "| learning_rate=0.02 | 1 |" in run(RATES) and runs == [SECOND]
