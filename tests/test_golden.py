"""Comparison of training losses with recorded ones (see tests/golden.py).

The short runs only: `python -m tests.golden` compares those of all recipes.
"""

import json

import pytest

from configs.schema import LAYOUTS
from tests import golden


@pytest.mark.parametrize("name", [name for name in golden.RUNS if name.startswith("smoke")])
def test_losses_of_the_smoke_runs_equal_the_recorded_ones(name):
    golden.compare(name, golden.losses(name))


def test_every_run_has_a_record_of_its_length():
    records = json.loads(golden.RECORD.read_text())
    new = set(LAYOUTS) - set(golden.RECORDED)  # these need no record
    optional = {name for name in golden.RUNS if name.rpartition(" ")[2] in new} - records.keys()
    assert list(records) == [name for name in golden.RUNS if name not in optional]
    assert set(golden.RECORDED) <= set(LAYOUTS)
    for name, record in records.items():
        assert len(record["losses"]) == (100 if "--max_iters=100" in golden.RUNS[name] else 10)
        assert record["losses"][-1] < record["losses"][0]
