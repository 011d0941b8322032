"""The settings in a checkpoint, checked like those of a file; what the recipes say."""

import math
import re

import pytest

from common.errors import ConfigError
from configs.schema import TrainConfig, from_dict
from tests.conftest import ROOT, printed

SHIPPED = sorted(ROOT.glob("configs/*.yaml"))
INVALID = [
    {"modle": {}}, {"seed": None}, {"seed": "x"}, {"seed": True}, {"seed": math.nan},
    {"dtype": "half"}, {"data": {"sources": ["a", 1]}},
]  # fmt: skip


@pytest.mark.parametrize("tree", INVALID, ids=str)
def test_invalid_settings_in_a_checkpoint_are_refused_in_one_line(tree):
    with pytest.raises(ConfigError) as caught:
        from_dict(tree)
    assert printed(caught.value)


@pytest.mark.parametrize("warmup", [0.3, 1 / 7, 0.3000000000001, 1])
def test_the_cooldown_that_the_message_names_is_the_largest_that_fits(warmup):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(warmup_ratio=warmup, cooldown_ratio=1)
    named = float(re.search(r"use --cooldown_ratio=(\S+) or less$", str(caught.value))[1])
    assert TrainConfig(warmup_ratio=warmup, cooldown_ratio=named)
    with pytest.raises(ConfigError):
        TrainConfig(warmup_ratio=warmup, cooldown_ratio=named + 2e-6)
