"""Settings changed by --resume and by --init_from: a change takes effect in the running model,
optimizer and batches, or is refused.
"""

import re

import pytest
import torch

from common.errors import ConfigError
from configs.command import parse_train
from configs.fields import settings_of
from configs.schema import Config, ModelConfig, flat_settings
from data.batches import evaluation_windows
from model.attention import KERNELS, LAYOUTS
from storage.checkpoint import BEST, LAST, load_checkpoint
from storage.differences import FIXED
from tests.conftest import ROOT
from tests.runs import train
from train import build_run
from training.distributed import World
from training.evaluate import exact_loss
from training.step import train_step


def other_value(name, value):
    """Return another value of a setting that cannot change; each is allowed beside the others."""
    choices = settings_of(Config)[name].metadata["choices"]
    if choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, str):
        return "x"
    if isinstance(value, bool):
        return not value
    return value / 2 if isinstance(value, float) and value else type(value)(2 * value or 1)


def block(run):
    return run.model.blocks[0]


# setting: the changed value, and what is measured in the running objects: (run) -> value, expected
EFFECTS = {
    "layout": ("stacked", lambda run: type(block(run).attention.projection),
                        LAYOUTS["stacked"]),
    "kernel": ("loop", lambda run: block(run).attention.kernel, KERNELS["loop"]),
    "dropout": (0.7, lambda run: (block(run).attention.dropout, block(run).mlp.dropout),
                      (0.7, 0.7)),
    "attention_dropout": (0.7, lambda run: block(run).attention.attention_dropout, 0.7),
    "learning_rate": (0.5, lambda run: run.optimizers[0].peak_lr, 0.5),
    "muon_learning_rate": (0.5, lambda run: run.optimizers[1].peak_lr, 0.5),
    "weight_decay": (0.5, lambda run: (run.optimizers[0].groups[0][1],
                                             run.optimizers[1].weight_decay), (0.5, 0.5)),
    "seed": (7, lambda run: run.batches._seed, 7),
    "dtype": ("bfloat16", lambda run: run.runtime.dtype, torch.bfloat16),
}  # fmt: skip


def built(*words):
    """Build the run that train.py makes of a command."""
    torch.set_num_threads(1)
    return build_run(parse_train(list(map(str, words))), World())[0]


@pytest.fixture(params=["resume", "init_from"])
def way(request):
    return request.param


@pytest.fixture
def changed(way, options, uninterrupted, tmp_path):
    """A function that builds the run that --resume or --init_from makes with changed settings."""
    text, config = tmp_path / "text.txt", tmp_path / "mine.yaml"
    if way == "resume":
        return lambda *changes: built(uninterrupted, *changes)
    config.write_text(f"{(ROOT / options[0]).read_text()}sources: {text}\n")
    words = [config, *options[1:-1], f"--out_dir={tmp_path}/new", f"--init_from={uninterrupted}"]
    return lambda *changes: built(*words, *changes)


def test_a_changed_setting_takes_effect_in_the_running_model_optimizer_and_batches(changed):
    unchanged = changed()
    for name, (value, measure, expected) in EFFECTS.items():
        assert measure(changed(f"--{name}={value}")) == expected, name
        assert measure(unchanged) != expected, f"{name} is measured where it has no effect"


def test_an_option_that_cannot_change_is_refused_with_both_values(changed, way, uninterrupted):
    own = flat_settings(load_checkpoint(uninterrupted / LAST).settings)
    fixed = {name: other_value(name, own[name]) for name in FIXED}
    if way == "init_from":  # residual_init decides on initial weights alone
        fixed = {name: value for name, value in fixed.items()
                 if hasattr(ModelConfig, name) and name != "residual_init"}  # fmt: skip
    with pytest.raises(ConfigError, match=r"; omit the option, or train a new model$") as error:
        changed(*(f"--{name}={value}" for name, value in fixed.items()))
    for name, value in fixed.items():
        assert f"--{name}={value} (it has {own[name]})" in str(error.value)
    changed(*(f"--{name}={own[name]}" for name in fixed))  # a repeated command


def test_a_run_that_starts_from_another_model_has_its_architecture(
    options, uninterrupted, tmp_path
):
    """Whatever the config says, or leaves at its default, as the recipe for small texts does."""
    words = ["configs/mytext_small.yaml", options[-1], "--max_iters=2", "--sample_chars=0"]
    new = tmp_path / "new"
    code, output = train(*words, f"--init_from={uninterrupted}", f"--out_dir={new}")
    assert code == 0
    note = re.search(f"the architecture is that of {uninterrupted / BEST}, not of .*", output)[0]
    assert ": n_layer 3 -> 1, " in note and ", n_embd 128 -> 16, " in note
    assert output.count("some of this validation text, the validation loss is too low") == 1
    then, now = (
        flat_settings(load_checkpoint(run / LAST).settings) for run in (uninterrupted, new)
    )
    for name in FIXED:
        assert not hasattr(ModelConfig, name) or now[name] == then[name]


def test_a_longer_context_than_that_of_the_parent_gives_the_same_loss_with_rope(
    train_run, options, tmp_path
):
    assert train_run("--positions=rope", "--max_iters=4")[0] == 0
    losses = []
    for size in (16, 64):
        start = [f"--init_from={tmp_path / 'run'}", f"--out_dir={tmp_path / 'new'}"]
        run = built(*options, *start, "--positions=rope", f"--block_size={size}")
        assert run.model.config.block_size == size
        windows = evaluation_windows(run.corpus.val, 16, 4)
        losses.append(exact_loss(run.model, windows, run.runtime))
    assert losses[0] == losses[1]


def test_each_step_of_a_run_has_its_own_dropout(uninterrupted):
    run, seeds = built(uninterrupted), set()
    for _ in range(3):
        train_step(run)
        seeds.add(torch.initial_seed())
    assert len(seeds) == 3
