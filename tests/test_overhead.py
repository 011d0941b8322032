"""The benchmark of logging and checkpoints: it runs on every kind of run."""

import re

import pytest

from benchmarks import overhead
from tests.campaigns.common import small_run_args, train


@pytest.mark.parametrize(
    "setting", ["--ngram_model=0", "--ngram_model=3", "--ngram_label_smoothing=0.1"]
)
def test_logging_and_checkpoints_of_a_run_are_timed(setting, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    lengths = ["--max_iters=12", "--eval_interval=6", "--log_interval=1"]
    assert train(*small_run_args(tmp_path), setting, *lengths, f"--out_dir={folder}")[0] == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["overhead", str(folder)])
    overhead.main()
    printed = capsys.readouterr().out
    share, saved, loaded, saves = re.search(
        r"TensorBoard: (\S+)%.*saved in (\S+) s, loaded in (\S+) s; at most (\d+) saves",
        printed,
        re.DOTALL,
    ).groups()
    assert -100 < float(share) < 100
    assert float(saved) > 0 and float(loaded) > 0
    assert saves == "4"  # of the best and the last, at each of two evaluations
