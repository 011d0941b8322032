"""Settings changed by --resume and by --init_from: a change takes effect in the running model,
optimizer and batches, or is refused.
"""

import re

import pytest
import torch

from common.errors import ConfigError
from configs.command import parse_train as parse
from configs.schema import flat_settings
from data.batches import evaluation_windows
from model.attention import KERNELS, LAYOUTS
from run.checkpoint import BEST, LAST, load
from run.differences import FIXED as FIXED_SETTINGS
from tests.conftest import ROOT
from tests.runs import train
from train import build
from training.distributed import World
from training.evaluate import exact_loss
from training.step import TrainStep

BASE = {
    "n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "batch_size": 4, "max_iters": 20,
    "warmup_ratio": 0.1, "cooldown_ratio": 0.85, "eval_interval": 10, "sample_chars": 5,
    "device": "cpu", "dtype": "float32", "schedule": "trapezoid", "optimizer": "muon",
}  # fmt: skip
FIXED = {  # settings of the model that its weights depend on, and another value of each
    "n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 4, "positions": "rope",
    "token_shifts": 1, "norm": "rmsnorm", "mlp": "relu2", "bias": True,
    "tied": False, "qk_norm": True, "logit_softcap": 5.0, "residual_init": "zero",
}  # fmt: skip


def block(run):
    return run.model.blocks[0]


def texts(run):
    """The training and the validation text."""
    decode, corpus = run.corpus.tokenizer.decode, run.corpus
    return [
        "".join(decode(split.ids[start:end]) for start, end in split.segments)
        for split in (corpus.train, corpus.val)
    ]


def gradient_norm(run):
    """The norm of the gradient that the optimizers get in a step."""
    norms = []
    run.optimizers[0].step = lambda: norms.extend(p.grad.norm() for p in run.model.parameters())
    TrainStep(run)()
    return torch.stack(norms).norm().item()


# setting: the changed value, and what is measured in the running objects: (run) -> value, expected
EFFECTS = {
    "data.sources": ("other.txt", lambda run: texts(run)[0][:5], "Zweil"),
    "data.encoding": ("latin-1", lambda run: "größer" in texts(run)[0], False),
    "data.val_sources": ("other.txt", lambda run: texts(run)[1][:5], "Zweil"),
    "data.val_fraction": (0.5, lambda run: round(len(texts(run)[1]) / sum(map(len, texts(run))), 1),
                          0.5),
    "model.attention": ("stacked", lambda run: type(block(run).attention.projection),
                        LAYOUTS["stacked"]),
    "model.kernel": ("loop", lambda run: block(run).attention.kernel, KERNELS["loop"]),
    "model.dropout": (0.7, lambda run: (run.model.config.dropout, block(run).attention.dropout,
                                        block(run).mlp.dropout), (0.7,) * 3),
    "model.attention_dropout": (0.7, lambda run: block(run).attention.attention_dropout, 0.7),
    "model.logit_scale": (0.5, lambda run: run.model.config.logit_scale, 0.5),
    "train.batch_size": (6, lambda run: len(run.batches(0)[0]), 6),
    "train.gradient_accumulation_steps": (3, lambda run: TrainStep(run)().predictions, 3 * 4 * 8),
    "train.optimizer": ("adamw", lambda run: len(run.optimizers), 1),
    "train.learning_rate": (0.5, lambda run: run.optimizers[0].peak_lr, 0.5),
    "train.muon_learning_rate": (0.5, lambda run: run.optimizers[1].peak_lr, 0.5),
    "train.beta1": (0.5, lambda run: run.optimizers[0].beta1, 0.5),
    "train.beta2": (0.5, lambda run: run.optimizers[0].beta2, 0.5),
    "train.muon_momentum": (0.5, lambda run: run.optimizers[1].momentum, 0.5),
    "train.weight_decay": (0.5, lambda run: (run.optimizers[0].groups[0][1],
                                             run.optimizers[1].weight_decay), (0.5, 0.5)),
    "train.grad_clip": (1e-3, gradient_norm, pytest.approx(1e-3, rel=1e-2)),
    "seed": (7, lambda run: run.batches._seed, 7),
    "dtype": ("bfloat16", lambda run: run.runtime.dtype, torch.bfloat16),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run of BASE after 4 steps, and the options of that run."""
    folder = tmp_path_factory.mktemp("saved")
    every_byte = "".join(map(chr, range(0x80, 0x100)))  # what UTF-8 becomes in latin-1
    lines = [f"Zeile {n} w: größer, schöner \ufffd\r\n" for n in range(60)]
    text = every_byte + "".join(lines)
    (folder / "text.txt").write_bytes(text.encode())
    (folder / "other.txt").write_bytes(("Zweil" + text).encode())
    recipe = (ROOT / "configs/smoke.yaml").read_text()
    (folder / "mine.yaml").write_text(f"{recipe}data: {{sources: {folder / 'text.txt'}}}\n")
    options = [folder / "mine.yaml", *(f"--{name}={value}" for name, value in BASE.items())]
    code, output = train(*options, f"--out_dir={folder / 'run'}", "--max_iters=4")
    assert code == 0, output
    return folder, options


def with_paths(saved, changes):
    """Return options in which texts are files in the folder of the saved run."""
    return [re.sub(r"=(\w+\.txt)", rf"={saved[0]}/\1", change) for change in changes]


def run_with(saved, way, *changes):
    """Build the run that --resume or --init_from makes with changed settings, as train.py."""
    folder, options = saved
    words = [*options, f"--out_dir={folder / 'new'}", f"--init_from={folder / 'run'}"]
    if way == "resume":
        words = [options[0], f"--out_dir={folder / 'run'}", "--resume", "--allow-data-change"]
    torch.set_num_threads(1)
    return build(parse([*map(str, words), "--max_iters=20", *with_paths(saved, changes)]), World())[
        0
    ]


@pytest.mark.parametrize("way", ["resume", "init_from"])
def test_a_changed_setting_takes_effect_in_the_running_model_optimizer_and_batches(way, saved):
    unchanged = run_with(saved, way)
    for name, (value, measure, expected) in EFFECTS.items():
        if way == "init_from" or name not in FIXED_SETTINGS:
            assert measure(run_with(saved, way, f"--{name}={value}")) == expected, name
            assert measure(unchanged) != expected, f"{name} is measured where it has no effect"


@pytest.mark.parametrize("way", ["resume", "init_from"])
def test_an_option_that_the_weights_depend_on_is_refused_with_both_values(way, saved):
    for name, value in FIXED.items():
        if way == "init_from" and name == "residual_init":
            continue  # it decides on initial weights alone
        own = flat_settings(load(saved[0] / "run" / LAST).settings)[f"model.{name}"]
        with pytest.raises(
            ConfigError, match=rf"this cannot change: --{name}={value} \(it has {own}\)"
        ):
            run_with(saved, way, f"--model.{name}={value}")
        run_with(saved, way, f"--model.{name}={own}")  # a repeated command


def test_what_a_resumed_run_cannot_change_is_refused_by_name(saved):
    run = saved[0] / "run"
    before = (run / LAST).read_bytes()
    changes = ["train.optimizer=adamw", "data.min_count=9", "data.separator=w", "val_fraction=0.3"]
    for change in changes:
        code, output = train(run, f"--{change}")
        name = change.partition("=")[0].rpartition(".")[2]
        assert code == 2 and f"this cannot change: --{name}=" in output
        assert (run / LAST).read_bytes() == before


def test_a_run_that_starts_from_another_model_has_its_architecture(saved, tmp_path):
    """Whatever the config file says: the recipe for small texts has another width than this."""
    folder, new = saved[0], tmp_path / "new"
    words = ["configs/mytext_small.yaml", f"--data.sources={folder / 'text.txt'}"]
    lengths = ["--max_iters=2", "--batch_size=2", "--sample_chars=0"]
    code, output = train(*words, *lengths, f"--init_from={folder / 'run'}", f"--out_dir={new}")
    assert code == 0 and f"the architecture is that of {folder / 'run' / BEST}: n_layer 1" in output
    architectures = [
        {name: value for name, value in flat_settings(load(run / LAST).settings).items()
         if name in FIXED_SETTINGS and name.startswith("model.")}
        for run in (folder / "run", new)
    ]  # fmt: skip
    assert architectures[0] == architectures[1]


def test_a_longer_context_than_that_of_the_parent_gives_the_same_loss_with_rope(saved, tmp_path):
    words = [*saved[1], "--positions=rope", "--logit_scale=0.9"]
    assert train(*words, "--max_iters=4", f"--out_dir={tmp_path / 'parent'}")[0] == 0
    start = [*words, f"--init_from={tmp_path / 'parent'}", f"--out_dir={tmp_path / 'new'}"]
    short, long = (
        build(parse([*map(str, start), f"--block_size={size}"]), World())[0] for size in (8, 32)
    )
    assert long.model.config.block_size == 32
    losses = [
        exact_loss(run.model, evaluation_windows(run.corpus.val, 8, 4), run.runtime)
        for run in (short, long)
    ]
    assert losses[0] == losses[1]


def test_fine_tuning_says_that_the_parent_may_have_seen_the_validation_text(saved, tmp_path):
    code, output = train(*saved[1], f"--init_from={saved[0] / 'run'}", f"--out_dir={tmp_path}/new")
    assert code == 0
    assert output.count("some of this validation text, the validation loss is too low") == 1


def test_each_step_of_a_run_has_its_own_dropout(saved):
    step, seeds = TrainStep(run_with(saved, "resume", "--dropout=0.7")), set()
    for _ in range(3):
        step()
        seeds.add(torch.initial_seed())
    assert len(seeds) == 3
