"""The settings in a checkpoint, checked like those of a file; what the recipes say."""

import math
import re
from dataclasses import asdict

import pytest

from common.errors import ConfigError
from configs.command import parse_train
from configs.schema import Config, TrainConfig, flat_settings, from_dict
from tests.conftest import ROOT, printed

SHIPPED = sorted(ROOT.glob("configs/*.yaml"))
INVALID = [
    {"modle": {}}, {"model": {"n_heads": 4}},
    {"seed": None}, {"seed": False}, {"seed": "6"}, {"seed": -1}, {"seed": math.nan}, {"seed": [1]},
    {"compile": 1}, {"dtype": ["auto"]}, {"dtype": "half"}, {"out_dir": "\ud800"},
    {"data": {"sources": "a"}}, {"data": {"sources": ["a", 1]}},
]  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_settings_come_back_from_a_checkpoint_as_they_were(path):
    config = parse_train([str(path)]).new_settings()
    assert from_dict(asdict(config)) == config


@pytest.mark.parametrize("tree", INVALID, ids=str)
def test_invalid_settings_in_a_checkpoint_are_refused_in_one_line(tree):
    with pytest.raises(ConfigError) as caught:
        from_dict(tree)
    assert printed(caught.value)


@pytest.mark.parametrize("warmup", [0.3, 0.07, 1 / 3, 1 / 7, 1 / 70, 0.3000000000001, 1])
def test_the_cooldown_that_the_message_names_is_the_largest_that_fits(warmup):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(warmup_ratio=warmup, cooldown_ratio=1)
    named = float(re.search(r"use --cooldown_ratio=(\S+) or less$", str(caught.value))[1])
    assert TrainConfig(warmup_ratio=warmup, cooldown_ratio=named)
    with pytest.raises(ConfigError):
        TrainConfig(warmup_ratio=warmup, cooldown_ratio=named + 2e-6)


def test_the_defaults_are_the_architecture_and_optimizer_of_the_main_recipe():
    main = flat_settings(parse_train([str(ROOT / "configs/shakespeare.yaml")]).new_settings())
    defaults = flat_settings(Config())
    different = {name.partition(".")[2] for name in main if main[name] != defaults[name]}
    assert different - {"sources", ""} <= {
        *("n_layer", "n_head", "n_embd", "block_size", "kernel", "dropout", "logit_scale"),
        *("batch_size", "max_iters", "eval_interval"),
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_recipe_says_only_what_differs_from_the_defaults(path):
    if not path.stem.startswith("nanogpt"):  # those say nanoGPT's values in full
        said, defaults = parse_train([str(path)]).file, flat_settings(Config())
        assert [name for name in said if name in defaults and said[name] == defaults[name]] == []
