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


def test_every_run_has_recorded_losses():
    new = set(LAYOUTS) - set(golden.RECORDED)  # these need none
    needed = {name for name in golden.RUNS if name.rpartition(" ")[2] not in new}
    assert needed <= json.loads(golden.RECORD.read_text()).keys()
