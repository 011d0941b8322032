"""Comparing settings: which runs are made, what counts as a difference, and no run is lost."""

import sys

import pytest

from benchmarks import trials
from configs.command import parse_train
from storage.folder import METRICS
from storage.log import HEADER
from tests.conftest import ROOT

SMOKE = "configs/smoke.yaml"
RATES = "--learning_rate=0.01,0.02"
FIRST, SECOND = "learning_rate=0.01,seed=1", "learning_rate=0.02,seed=1"


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Return a function that compares settings and returns what is printed, and a list of runs.

    A run is only recorded. It fails if it is named in `failing`, with this exit code and last line.
    """
    runs, failing = [], {}

    def train(run):
        runs.append(run.folder.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        code, line = failing.get(run.folder.name, (0, ""))
        (run.folder / trials.OUTPUT).write_text(f"text\n{line}\n\n")
        rate = float(run.trial.partition("=")[2] or 0)
        rows = f"1,6,,,,4,1,\n60,6,,,,{1.4 + rate + run.seed / 1000},1,\n"
        (run.folder / METRICS).write_text(f"{HEADER}\n{rows}")
        trials.write_record(run, finished=code == 0)
        return code

    def compare(*arguments, failing_runs=None):
        runs.clear()
        failing.clear()
        failing.update(failing_runs or {})
        trials.main([SMOKE, f"--name={tmp_path}/campaign", *arguments])
        return capsys.readouterr().out

    monkeypatch.setattr(trials, "train", train)
    monkeypatch.setattr(trials, "check", lambda runs: None)
    return compare, runs


def test_each_combination_is_trained_with_each_seed_and_the_rest_goes_to_all():
    _, runs = trials.parse_trials([SMOKE, RATES, "--n_layer=1,2", "--max_iters=60", "--seeds=2"])
    assert [run.seed for run in runs] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [run.trial for run in runs[:2]] == [f"learning_rate=0.01,n_layer={n}" for n in (1, 2)]
    assert len({run.folder for run in runs}) == 8
    command = parse_train(runs[-1].words)
    config = command.new_settings()
    assert command.resume  # what was interrupted continues
    assert (config.train.learning_rate, config.model.n_layer, config.seed) == (0.02, 2, 2)
    assert config.train.max_iters == 60


def test_a_mistake_is_reported_by_train_py_before_any_run(monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(trials, "train", None)
    with pytest.raises(SystemExit, match="2"):
        trials.main([SMOKE, "--learning_rate=0.01,fast"])
    assert "--learning_rate" in capfd.readouterr().err


def test_values_that_do_not_follow_an_equals_sign_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        trials.parse_trials([SMOKE, "--learning_rate", "0.01,0.02"])
    assert "error: 0.01,0.02: write --key=VALUE,VALUE" in capsys.readouterr().err


def test_a_difference_counts_by_the_rule():
    def counts(a, b):
        by_seed = [dict(enumerate(losses)) for losses in (a, b)]
        (counts,) = {trials.is_difference(*by_seed), trials.is_difference(*by_seed[::-1])}
        return counts

    assert counts([1.41, 1.42], [1.40, 1.41])  # two seeds gain 0.01 each
    assert not counts([1.41, 1.42], [1.40, 1.42])
    assert counts([1.408, 1.409, 1.410], [1.40, 1.401, 1.402])  # the means differ by 0.008
    assert not counts([1.407, 1.408, 1.410], [1.40, 1.401, 1.402])
    assert not counts([1.5], [1.4])  # one seed


def test_the_table_has_mean_and_spread_and_the_rule_and_the_picture_a_legend(compare, tmp_path):
    run, _ = compare
    printed = run(RATES, "--seeds=3")
    assert "run 3 of 6: learning_rate=0.01,seed=2\n  loss 1.4120, 6.0 min\n" in printed
    assert (
        "| learning_rate=0.01 | 3 | 1.4120 | 1.4110 to 1.4130 | lowest | 60 | 6.0 |\n"
        "| learning_rate=0.02 | 3 | 1.4220 | 1.4210 to 1.4230 | 0.0100: counts | 60 | 6.0 |\n"
        f"\n{trials.RULE}\n"
    ) in printed
    picture = (tmp_path / "campaign" / "losses.svg").read_text()
    assert picture.count(">learning_rate=0.0") == 2


def test_finished_runs_are_not_repeated_and_stay_in_the_table(compare):
    run, runs = compare
    run(RATES)
    assert runs == [FIRST, SECOND]
    printed = run("--learning_rate=0.01,0.02,0.03")
    assert runs == ["learning_rate=0.03,seed=1"]
    assert "| learning_rate=0.02 | 1 | 1.4210 | 1.4210 to 1.4210 | 0.0100: does not" in printed


def test_a_folder_with_the_run_of_another_command_is_left_alone(compare):
    run, runs = compare
    run(RATES, "--max_iters=60")
    with pytest.raises(SystemExit, match=r"has the run of .*--max_iters=60.*another --name"):
        run(RATES, "--max_iters=50")
    assert not runs


def test_without_matplotlib_a_line_says_so_before_the_first_run_and_there_is_a_table(
    compare, monkeypatch
):
    run, _ = compare
    monkeypatch.setattr(trials, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # which import takes for missing
    printed = run(RATES)
    assert printed.startswith("note: no picture without matplotlib: pip install matplotlib, now")
    assert "| learning_rate=0.01 | 1 |" in printed


def test_a_failed_run_is_named_with_its_last_line_and_tried_again(compare, capsys):
    run, runs = compare
    failing = {SECOND: (6, "error: step 7: the loss is nan")}
    with pytest.raises(SystemExit, match=f"failed: {SECOND}: exit code 6: error: step 7: the loss"):
        run(RATES, failing_runs=failing)
    printed = capsys.readouterr().out
    assert "| learning_rate=0.01 | 1 |" in printed and "| learning_rate=0.02 | 1 |" not in printed
    assert "| learning_rate=0.02 | 1 |" in run(RATES) and runs == [SECOND]
