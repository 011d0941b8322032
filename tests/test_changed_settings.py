"""Settings changed by --resume and by --init_from: a change takes effect in the running model,
optimizer and batches, or is refused.
"""

import pytest
import torch

from common.console import ConfigError
from configs.command import ARCHITECTURE, FIXED
from configs.schema import settings_by_name
from data.batches import evaluation_windows
from model.attention import LAYOUTS
from storage.checkpoint import BEST, LAST, load_checkpoint
from tests.conftest import ROOT
from tests.runs import build, train
from train import train_step
from training.evaluate import exact_loss

# setting: the changed value, and what is measured in the running objects
EFFECTS = {
    "layout": ("stacked", lambda run: type(run.model.blocks[0].attention.qkv), LAYOUTS["stacked"]),
    "kernel": ("loop", lambda run: run.model.blocks[0].attention.kernel, "loop"),
    "dropout": (0.7, lambda run: (run.model.blocks[0].attention.dropout,
                                  run.model.blocks[0].mlp.dropout), (0.7, 0.7)),
    "attention_dropout": (0.7, lambda run: run.model.blocks[0].attention.attention_dropout, 0.7),
    "learning_rate": (0.5, lambda run: run.optimizers[0].peak_lr, 0.5),
    "muon_learning_rate": (0.5, lambda run: run.optimizers[1].peak_lr, 0.5),
    "weight_decay": (0.5, lambda run: (run.optimizers[0].groups[0][1],
                                       run.optimizers[1].weight_decay), (0.5, 0.5)),
    "dtype": ("bfloat16", lambda run: run.runtime.dtype, torch.bfloat16),
}  # fmt: skip
# other values than it has
REFUSED = {"n_layer": 2, "n_head": 4, "n_embd": 32, "activation": "swiglu"}


@pytest.fixture(params=["resume", "init_from"])
def way(request):
    return request.param


@pytest.fixture
def changed(way, options, uninterrupted, tmp_path):
    """A function that builds the run that --resume or --init_from makes with changed settings."""
    text, config = tmp_path / "text.txt", tmp_path / "mine.yaml"
    if way == "resume":
        return lambda *changes: build(uninterrupted, *changes)
    config.write_text(f"{(ROOT / options[0]).read_text()}sources: {text}\n")
    words = [config, *options[1:-1], f"--out_dir={tmp_path}/new", f"--init_from={uninterrupted}"]
    return lambda *changes: build(*words, *changes)


def test_changed_setting_takes_effect(changed):
    unchanged = changed()
    for name, (value, measure, expected) in EFFECTS.items():
        assert measure(changed(f"--{name}={value}")) == expected, name
        assert measure(unchanged) != expected, f"{name} is measured where it has no effect"


def test_fixed_setting_is_refused(changed, way, uninterrupted):
    """With both values; a repeated command is none."""
    own = settings_by_name(load_checkpoint(uninterrupted / LAST).settings)
    of_run = {"max_val_chars": 5, "optimizer": "adamw", "seed": 7}
    wrong = REFUSED | (of_run if way == "resume" else {})
    with pytest.raises(ConfigError, match=r"; omit it, or train a new model$") as error:
        changed(*(f"--{name}={value}" for name, value in wrong.items()))
    for name, value in wrong.items():
        assert f"--{name}={value} (it has {own[name]})" in str(error.value)
    changed(*(f"--{name}={own[name]}" for name in FIXED if own[name] != ""))


def test_init_from_keeps_the_architecture(options, uninterrupted, tmp_path):
    """Whatever the config says, or leaves at its default, as the recipe for small texts does."""
    new, config = tmp_path / "new", tmp_path / "mine.yaml"
    recipe = (ROOT / "configs/mytext_small.yaml").read_text()
    config.write_text(f"{recipe}block_size: 32\n")
    words = [config, options[-1], "--max_iters=2", "--sample_chars=0"]
    code, output = train(*words, f"--init_from={uninterrupted}", f"--out_dir={new}")
    assert code == 0, output
    assert f"the architecture is that of {uninterrupted / BEST}\n" in output
    assert f"note: of {config}, these do not count: n_layer 3, block_size 32\n" in output
    note = "note: on text that this parent was trained on, the validation loss is too low"
    assert output.count(note) == 1
    then, now = (load_checkpoint(run / LAST).settings for run in (uninterrupted, new))
    then, now = settings_by_name(then), settings_by_name(now)
    assert all(now[name] == then[name] for name in ARCHITECTURE)


def test_init_from_with_a_longer_context(train_run, options, tmp_path, capsys):
    """With rope, it gives the same loss; only an option changes it."""
    assert train_run("--positions=rope", "--max_iters=4")[0] == 0
    found = []
    for size in (16, 64):
        start = [f"--init_from={tmp_path / 'run'}", f"--out_dir={tmp_path / 'new'}"]
        recipe = "configs/shakespeare.yaml"
        run = build(recipe, *options[1:], *start, "--positions=rope", f"--block_size={size}")
        assert run.model.config.block_size == size
        windows = evaluation_windows(run.corpus.val, 16, 4)
        found.append(exact_loss(run.model, windows, run.runtime))
        assert "block_size 512; as an option, block_size counts\n" in capsys.readouterr().out
    assert found[0] == found[1]


def test_dropout_of_each_step_is_its_own(uninterrupted):
    run, seeds = build(uninterrupted), set()
    for _ in range(3):
        train_step(run)
        seeds.add(torch.initial_seed())
    assert len(seeds) == 3
