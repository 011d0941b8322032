"""Settings changed by --resume and by --init_from: a change takes effect in the running model,
optimizer and batches, or is refused.
"""

import re

import pytest
import torch

from common.errors import CheckpointError
from configs.command import parse_train as parse
from model.attention import KERNELS, LAYOUTS
from run.checkpoint import LAST
from run.differences import FIXED_IN_A_RUN
from tests.conftest import ROOT
from tests.runs import train
from train import build
from training.distributed import World
from training.step import TrainStep

BASE = {
    "n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "batch_size": 4, "max_iters": 20,
    "warmup_iters": 2, "eval_interval": 10, "sample_chars": 5, "device": "cpu",
    "dtype": "float32", "schedule": "trapezoid", "optimizer": "muon",
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
    code, output = train(
        *options, f"--out_dir={folder / 'run'}", "--max_iters=4", "--warmup_iters=2"
    )
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
        if way == "init_from" or name not in FIXED_IN_A_RUN:
            assert measure(run_with(saved, way, f"--{name}={value}")) == expected, name
            assert measure(unchanged) != expected, f"{name} is measured where it has no effect"


@pytest.mark.parametrize("way", ["resume", "init_from"])
def test_a_setting_that_the_weights_depend_on_is_refused_by_name(way, saved):
    for name, value in FIXED.items():
        with pytest.raises(
            CheckpointError, match=rf"differ from the checkpoint in model\.{name} \(.*cannot change"
        ):
            run_with(saved, way, f"--model.{name}={value}")


def test_what_a_resumed_run_cannot_change_is_refused_by_name(saved):
    folder, options = saved
    before = (folder / "run" / LAST).read_bytes()
    resume = [options[0], f"--out_dir={folder / 'run'}", "--resume"]
    changes = ["train.optimizer=adamw", "data.min_count=9", "data.separator=w", "val_fraction=0.3"]
    for change in changes:
        code, output = train(*resume, f"--{change}")
        assert code == 4 and change.partition("=")[0] in output.splitlines()[-1]
        assert "set them back, or start a new run without --resume" in output
        assert (folder / "run" / LAST).read_bytes() == before


def test_a_fine_tuned_run_says_once_that_its_parent_may_know_the_validation_text(saved, tmp_path):
    start = [f"--init_from={saved[0] / 'run'}", f"--out_dir={tmp_path / 'new'}", "--max_iters=4"]
    code, output = train(*saved[1], *start)
    said = (
        "if the parent was trained on some of this validation text, the validation loss is too low"
    )
    assert code == 0 and output.count(said) == 1


def test_each_step_of_a_run_has_its_own_dropout(saved):
    step, seeds = TrainStep(run_with(saved, "resume", "--dropout=0.7")), set()
    for _ in range(3):
        step()
        seeds.add(torch.initial_seed())
    assert len(seeds) == 3
