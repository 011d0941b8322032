"""Comparing settings: which runs are made, what counts as a difference, and no run is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest

from benchmarks import trials
from common.errors import UserError
from run.checkpoint import METRICS
from run.log import HEADER
from tests.conftest import ROOT
from tests.runs import merged, small_run_args

SMOKE = "configs/smoke.yaml"
RATES = "--learning_rate=0.01,0.02"
FIRST, SECOND = "learning_rate=0.01,seed=1", "learning_rate=0.02,seed=1"


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Return a function that compares settings and returns what is printed, and a list of runs.

    A run is only recorded. It fails if it is named in `failing`, with this exit code and last line.
    """
    monkeypatch.chdir(tmp_path)
    runs = []

    def train(run):
        runs.append(run.folder.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        code, line = failing.get(run.folder.name, (0, ""))
        (run.folder / trials.OUTPUT).write_text(f"text\n{line}\n\n")
        loss = 1.4 + run.command.new_settings().train.learning_rate + run.seed / 1000
        last = 60 + (run.command.minutes or 0) * run.seed  # with --minutes, the steps that fit
        rows = [f"{step:g},6,,,,{value},1\n" for step, value in ((1, 4), (last, loss))]
        (run.folder / METRICS).write_text(HEADER + "".join(rows))
        trials.write_record(run, finished=code == 0)
        return code

    def compare(*arguments, failing_runs=None):
        runs.clear()
        failing.clear()
        failing.update(failing_runs or {})
        trials.main([SMOKE, *arguments])
        return capsys.readouterr().out

    failing = {}
    monkeypatch.setattr(trials, "train", train)
    return compare, runs


def test_each_combination_is_trained_with_each_seed_and_the_rest_goes_to_all():
    options = [RATES, "--n_layer", "1,2", "--sources=a,b.txt", "--max_iters=60", "--seeds=2"]
    _, runs = trials.parse_trials([SMOKE, *options])
    assert [run.seed for run in runs] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [run.trial for run in runs[:2]] == [f"learning_rate=0.01,n_layer={n}" for n in (1, 2)]
    assert len({run.folder for run in runs}) == 8
    config = runs[-1].command.new_settings()
    assert (config.train.learning_rate, config.model.n_layer, config.seed) == (0.02, 2, 2)
    assert config.data.sources == ("a,b.txt",) and config.train.max_iters == 60


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([SMOKE, RATES, "--seed=1,2"], "--seed: benchmarks.trials chooses it.*--seeds=N"),
        ([SMOKE, "--out-dir=x"], "--out-dir: benchmarks.trials chooses it"),
        ([SMOKE, "--learning_rate=0.01,fast"], "--learning_rate.*number.*'fast'"),
        ([SMOKE, "--learning_rat=1,2"], "did you mean --learning_rate"),
        ([SMOKE, "--learning_rate=1,1"], "learning_rate=1,seed=1: given twice"),
        ([SMOKE, RATES, "--seeds=0"], "seeds must be .*in .1, 1000"),
        ([RATES], "takes one config file"),
    ],
)
def test_wrong_arguments_are_reported_before_any_run(arguments, words):
    with pytest.raises(UserError, match=words):
        trials.parse_trials(arguments)


@pytest.mark.parametrize(
    "a, b, counts",
    [
        ([1.41, 1.42], [1.40, 1.41], True),  # two seeds gain 0.01 each
        ([1.41, 1.42], [1.40, 1.42], False),
        ([1.408, 1.409, 1.410], [1.40, 1.401, 1.402], True),  # the means of three differ by 0.008
        ([1.407, 1.408, 1.410], [1.40, 1.401, 1.402], False),
        ([1.5], [1.4], False),  # one seed
        ([1.45, 1.41, 1.41], [1.40, 1.42, 1.40], True),  # the means, although the second is lower
    ],
)
def test_a_difference_counts_by_the_rule(a, b, counts):
    by_seed = [dict(enumerate(losses)) for losses in (a, b)]
    assert trials.is_difference(*by_seed) == trials.is_difference(*by_seed[::-1]) == counts


def test_the_table_has_mean_and_spread_and_the_rule(compare):
    run, _ = compare
    printed = run(RATES, "--seeds=3", "--minutes=2").splitlines()
    assert "run 3 of 6: learning_rate=0.01,seed=2 (about 8 min left)" in printed
    assert printed[-7:-1] == [
        "| learning_rate=0.01 | 3 | 1.4120 | 1.4110 to 1.4130 | lowest | 62 to 66 | 6.0 |",
        "| learning_rate=0.02 | 3 | 1.4220 | 1.4210 to 1.4230 | 0.0100: counts | 62 to 66 | 6.0 |",
        "",
        *trials.RULE,
        "picture: out/trials/smoke/losses.svg",
    ]


def test_finished_runs_are_not_repeated_and_stay_in_the_table(compare):
    run, runs = compare
    run("--learning_rate=0.02", "--name=mine")
    assert runs == ["seed=1"]
    run(RATES)
    printed = run("--learning_rate=0.01,0.02,0.03")
    assert runs == ["learning_rate=0.03,seed=1"]
    assert (
        "| learning_rate=0.02 | 1 | 1.4210 | 1.4210 to 1.4210 | 0.0100: does not count |" in printed
    )


def test_a_folder_with_other_settings_is_left_alone(compare):
    run, runs = compare
    run(RATES, "--max_iters=60")
    with pytest.raises(UserError, match=r"max_iters 60, not 50.*another --name"):
        run(RATES, "--max_iters=50")
    assert not runs


def test_a_failed_run_is_named_with_its_last_line_and_tried_again(compare):
    run, runs = compare
    failing = {SECOND: (6, "error: step 7: the loss is nan")}
    printed = run(RATES, failing_runs=failing)
    assert f"failed: {SECOND}, exit code 6: error: step 7: the loss is nan" in printed
    assert "| learning_rate=0.01 | 1 |" in printed and "| learning_rate=0.02 | 1 |" not in printed
    assert "| learning_rate=0.02 | 1 |" in run(RATES) and runs == [SECOND]


def test_if_all_runs_fail_the_command_ends_with_their_exit_code(compare):
    run, _ = compare
    failing = dict.fromkeys((FIRST, SECOND), (3, "error: no such text"))
    with pytest.raises(
        UserError, match=r"all 2 runs failed.*exit code 3: error: no such"
    ) as caught:
        run(RATES, failing_runs=failing)
    assert caught.value.exit_code == 3


def test_the_picture_shows_every_trial_and_is_the_same_each_time(compare, tmp_path):
    run, _ = compare
    run("--learning_rate=0.01,9")  # losses of 1.4 and 10.4
    path = tmp_path / "out/trials/smoke/losses.svg"
    first = path.read_bytes()
    words = [element.text for element in ElementTree.fromstring(first).iter() if element.text]
    assert {"learning_rate=0.01", "learning_rate=9", "steps"} <= set(words)
    run("--learning_rate=0.01,9")
    assert path.read_bytes() == first


@pytest.mark.skipif(os.name == "nt", reason="process groups")
def test_an_interrupted_run_is_saved_and_resumed(tmp_path):
    """Interrupt the second of two real runs as a terminal does: all processes of the group."""
    arguments = merged([*small_run_args(tmp_path), "--max_iters=300", RATES])
    command = [sys.executable, "-m", "benchmarks.trials", *arguments, f"--name={tmp_path}"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    second = tmp_path / SECOND
    while not (second / METRICS).exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130 and process.stdout.read().endswith("command continues\n")
    assert "stopped and saved at step" in (second / trials.OUTPUT).read_text()
    assert not json.loads((second / trials.RECORD).read_text())["finished"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "seed=1 (finished earlier)" in done.stdout
    assert "resuming from" in (second / trials.OUTPUT).read_text()
