"""Comparing settings: which runs are made, what counts as a difference, and no run is lost."""

import pytest

from benchmarks import trials
from configs.command import parse_train
from storage.log import CSV_HEADER, METRICS
from tests.conftest import ROOT

SMOKE = "configs/smoke.yaml"
RATES = "--learning_rate=0.01,0.02"
FIRST, SECOND = "learning_rate=0.01,seed=1", "learning_rate=0.02,seed=1"


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """A function that compares settings and returns what is printed; `runs` are those it made.

    A run is only recorded; it fails if it is named in `failing`.
    """

    def compare(*arguments, failing=()):
        def train(run):
            compare.runs.append(run.folder.name)
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / trials.OUTPUT).write_text("text\nerror: the loss is nan\n")
            loss = 1.4 + float(run.trial.partition("=")[2]) + run.seed / 1000
            (run.folder / METRICS).write_text(f"{CSV_HEADER}\n60,6,,,,{loss},1,\n")
            trials.write_record(run, finished=run.folder.name not in failing)
            return 2 if run.folder.name in failing else 0

        monkeypatch.setattr(trials, "train", train)
        trials.main([SMOKE, f"--name={tmp_path}/campaign", *arguments])
        return capsys.readouterr().out

    monkeypatch.chdir(ROOT)
    compare.runs = []
    return compare


def test_trials_combine_values_and_seeds():
    runs = trials.parse_trials([SMOKE, RATES, "--n_layer=1,2", "--max_iters=60", "--seeds=2"])
    assert [run.seed for run in runs] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert len({run.folder for run in runs}) == 8
    assert runs[-1].trial == "learning_rate=0.02,n_layer=2"
    config = parse_train(runs[-1].words).config
    assert (config.train.learning_rate, config.model.n_layer, config.seed) == (0.02, 2, 2)
    assert config.train.max_iters == 60 and "--resume" in runs[-1].words


@pytest.mark.parametrize(
    ("a", "b", "counts"),
    [
        ([1.41, 1.42], [1.40, 1.41], True),  # two seeds gain 0.01 each
        ([1.41, 1.42], [1.40, 1.42], False),
        ([1.408, 1.409, 1.410], [1.40, 1.401, 1.402], True),  # the means differ by 0.008
        ([1.407, 1.408, 1.410], [1.40, 1.401, 1.402], False),
        ([1.5], [1.4], False),  # one seed
    ],
)
def test_trials_difference_counts_by_rule(a, b, counts):
    a, b = ({i: {"val/loss": loss} for i, loss in enumerate(losses)} for losses in (a, b))
    assert trials.is_difference(a, b) == trials.is_difference(b, a) == counts


def test_trials_table(compare):
    assert (
        "| learning_rate=0.01 | 3 | 1.4120 | 1.4110 to 1.4130 | lowest | 60 | 6.0 |\n"
        "| learning_rate=0.02 | 3 | 1.4220 | 1.4210 to 1.4230 | 0.0100: counts | 60 | 6.0 |\n"
    ) in compare(RATES, "--seeds=3")


def test_trials_run_what_is_missing(compare, capsys):
    """A new value, and what has failed; never a finished run."""
    with pytest.raises(SystemExit, match="error: 1 of 2 runs failed"):
        compare(RATES, failing=[SECOND])
    assert f"{SECOND}\n  exit code 2: error: the loss is nan\n" in capsys.readouterr().out
    compare(f"{RATES},0.03")
    assert compare.runs == [FIRST, SECOND, SECOND, "learning_rate=0.03,seed=1"]


def test_trials_leave_other_runs_alone(compare):
    compare(RATES, "--max_iters=60")
    with pytest.raises(SystemExit, match=r"has the run of .*--max_iters=60.*another --name"):
        compare(RATES, "--max_iters=50")
    assert compare.runs == [FIRST, SECOND]
