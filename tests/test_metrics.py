"""metrics.csv: the numbers of TensorBoard, cut back at a resume, never in the way of training."""

import csv

import pytest

from checkpointing.checkpoint import METRICS
from dashboard.metrics import COLUMNS, HEADER, MetricsFile
from tests.runs import scalars, stop_at, train


@pytest.fixture
def options(options):
    return [*options, "--log_interval=2"]


def rows_of(run):
    with open(run / METRICS, encoding="ascii", newline="") as file:
        return list(csv.DictReader(file))


def test_the_file_has_the_numbers_that_tensorboard_shows(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}")[0] == 0
    rows, shown = rows_of(run), scalars(run)
    assert list(rows[0]) == ["step", "minutes", *COLUMNS]
    for column, tag in COLUMNS.items():
        found = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
        logged = shown.get(tag, [])  # no exact match without answers
        assert [step for step, _ in found] == [step for step, _ in logged], column
        values = [value for _, value in logged]
        assert [value for _, value in found] == pytest.approx(values, rel=1e-6)
    minutes = [float(row["minutes"]) for row in rows]
    assert minutes == sorted(minutes)


def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(*options, f"--out_dir={whole}")[0] == 0
    stop_at(15, *options, f"--out_dir={parts}")
    with open(parts / METRICS, "a", encoding="ascii") as file:
        file.write("17,9.000,1,1,1,,\n2")  # logged after the checkpoint; of step 20, cut by a kill
    assert train(*options, f"--out_dir={parts}", "--resume")[0] == 0
    rows = [[{**row, "minutes": None} for row in rows_of(run)] for run in (whole, parts)]
    assert rows[0] == rows[1]
    minutes = [float(row["minutes"]) for row in rows_of(parts)]
    assert minutes == sorted(minutes) and minutes[-1] < 9
    short = ["--overwrite", "--max_iters=4", "--warmup_iters=0", "--cooldown_iters=2"]
    assert train(*options, f"--out_dir={parts}", *short)[0] == 0
    assert {int(row["step"]) for row in rows_of(parts)} == {1, 2, 4}


def test_a_file_with_fewer_columns_from_an_older_version_goes_on(tmp_path):
    path = tmp_path / METRICS
    path.write_text(HEADER.replace(",exact_match", "") + "5,1.000,2,0.1,1,,\n", encoding="ascii")
    MetricsFile(path, 5).add(10, {"val/loss": 2.0, "val/exact_match": 0.5})
    old, new = rows_of(tmp_path)
    assert (old["train_loss"], new["val_loss"], new["exact_match"]) == ("2", "2", "0.5")
