"""Settings changed by --resume and by --init_from: a change takes effect in the running model,
optimizer and batches, or is refused.
"""

import pytest
import torch

from common.console import ConfigError
from configs.command import ARCHITECTURE
from configs.schema import to_flat
from data.batches import evaluation_windows
from model.attention import LAYOUTS
from storage.checkpoint import BEST, LAST, load_checkpoint, load_model
from tests.runs import build
from train import train_step
from training.evaluate import exact_loss

# setting: the changed value, and what is measured in the running objects
EFFECTS = {
    "layout": ("stacked", lambda run: type(run.model.blocks[0].attention.qkv), LAYOUTS["stacked"]),
    "kernel": ("loop", lambda run: run.model.blocks[0].attention.kernel, "loop"),
    "dropout": (0.7, lambda run: run.model.blocks[0].mlp.dropout, 0.7),
    "learning_rate": (0.5, lambda run: run.optimizers[0].peak_lr, 0.5),
    "dtype": ("bfloat16", lambda run: run.runtime.dtype, torch.bfloat16),
}
# another value, and that of the run
REFUSED = {"n_layer": (2, 1), "n_embd": (32, 16)}
REFUSED_IN_A_RESUME = {"optimizer": ("adamw", "muon"), "seed": (7, 1337)}


@pytest.fixture(params=["resume", "init_from"])
def start(request, options, uninterrupted, tmp_path):
    """The command that starts from a saved run."""
    if request.param == "resume":
        return [uninterrupted]
    return [*options, f"--out_dir={tmp_path / 'new'}", f"--init_from={uninterrupted}"]


def test_changed_setting_takes_effect(start):
    unchanged = build(*start)
    for name, (value, measure, expected) in EFFECTS.items():
        assert measure(build(*start, f"--{name}={value}")) == expected, name
        assert measure(unchanged) != expected, f"{name} is measured where it has no effect"


def test_fixed_setting_is_refused(start, uninterrupted):
    """With both values; the same value is accepted."""
    refused = REFUSED | (REFUSED_IN_A_RESUME if start == [uninterrupted] else {})
    with pytest.raises(ConfigError) as error:
        build(*start, *(f"--{name}={new}" for name, (new, _) in refused.items()))
    for name, (new, own) in refused.items():
        assert f"--{name}={new} (it has {own})" in str(error.value)
    build(*start, *(f"--{name}={own}" for name, (_, own) in refused.items()))


def test_init_from_keeps_the_architecture(options, uninterrupted, tmp_path, capsys):
    """Whatever the config says, or leaves at its default."""
    config = tmp_path / "mine.yaml"
    config.write_text("n_layer: 3\nblock_size: 32\n")
    words = [config, options[-1], f"--init_from={uninterrupted}", f"--out_dir={tmp_path / 'new'}"]
    new = to_flat(build(*words).settings)
    parent = to_flat(load_checkpoint(uninterrupted / LAST).settings)
    assert all(new[name] == parent[name] for name in ARCHITECTURE)
    output = capsys.readouterr().out
    assert f"the architecture is that of {uninterrupted / BEST}\n" in output
    assert f"note: of {config}, these do not count: n_layer 3, block_size 32\n" in output


def test_init_from_with_a_longer_context(train_run, options, tmp_path):
    """With rope, it gives the same loss."""
    assert train_run("--positions=rope", "--max_iters=4")[0] == 0
    start = [f"--init_from={tmp_path / 'run'}", f"--out_dir={tmp_path / 'new'}"]
    run = build(*options, *start, "--positions=rope", "--block_size=64")
    assert run.model.config.block_size == 64
    windows = list(evaluation_windows(run.corpus.val, 16, 4))
    parent = load_model(tmp_path / "run")[0]
    assert exact_loss(run.model, windows, run.runtime) == exact_loss(parent, windows, run.runtime)


def test_dropout_of_each_step_is_its_own(uninterrupted):
    run, seeds = build(uninterrupted), set()
    for _ in range(3):
        train_step(run)
        seeds.add(torch.initial_seed())
    assert len(seeds) == 3
