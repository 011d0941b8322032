"""Recorded losses of a small run, and its checkpoint of step 8, which later versions read.

    python -m tests.slow.test_stored    # records both anew: after the first release, losses alone

Its architecture and optimizer are nanoGPT's; tests/test_hornbook.py protects those of our recipes.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from storage.checkpoint import LAST, load_checkpoint, to_bytes
from tests.runs import scalars, train, train_and_copy

STORED = Path(__file__).with_name("stored.safetensors")
LOSSES = {1: 4.11105, 5: 3.91007, 10: 3.6528, 15: 3.61085, 16: 3.62675}  # by step
OPTIONS = [
    "configs/nanogpt_cpu.yaml", "--n_layer=2", "--n_head=2", "--n_embd=8", "--block_size=16",
    "--max_iters=16", "--learning_rate=0.01", "--warmup_ratio=0.125", "--eval_interval=8",
    "--log_interval=5", "--sample_chars=0", "--dtype=float32", "--device=cpu", "--kernel=sdpa",
    "--sources=data/plays/admiral.txt",
]  # fmt: skip


def losses(folder):
    return dict(scalars(folder)["train/loss"])


def test_recorded_losses(tmp_path):
    code, output = train(*OPTIONS, f"--out_dir={tmp_path}/run")
    assert code == 0, output
    assert losses(tmp_path / "run") == pytest.approx(LOSSES, abs=1e-4)


def test_stored_checkpoint_is_resumed(tmp_path):
    shutil.copyfile(STORED, tmp_path / LAST)
    assert load_checkpoint(STORED).progress.step == 8
    code, output = train(tmp_path)
    assert code == 0, output
    assert losses(tmp_path) == pytest.approx({n: LOSSES[n] for n in (10, 15, 16)}, abs=1e-4)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        copy = train_and_copy(Path(folder, "auto"), 8, *OPTIONS)
        saved = load_checkpoint(copy / LAST)
        saved.settings = replace(saved.settings, out_dir="auto")
        STORED.write_bytes(to_bytes(saved))
        print({n: round(loss, 5) for n, loss in losses(Path(folder, "auto")).items()})
