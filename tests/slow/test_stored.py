"""Stored checkpoints, which every later version of the same format reads and resumes.

python -m tests.slow.test_stored NAME    # store one for configs/NAME.yaml; if it is stored already,
                                    # only record its losses again
"""

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from common.files import write_atomic
from configs.command import parse_train
from configs.schema import Config
from storage import load_model
from storage.checkpoint import LAST, load_checkpoint, to_bytes
from tests.conftest import ROOT
from tests.runs import scalars, stop_at, train

STORED = ROOT / "tests" / "stored"
TEXT = STORED / "text.txt"
NAMES = sorted(path.stem for path in STORED.glob("*.safetensors"))
SMALLEST = [
    "--n_layer=2", "--n_head=2", "--n_embd=8", "--block_size=16", "--batch_size=4",
    "--gradient_accumulation_steps=1", "--max_iters=16", "--warmup_ratio=0.125",
    "--cooldown_ratio=0.5",
    "--eval_interval=4", "--log_interval=1", "--sample_chars=4", "--dtype=float32",
    "--device=cpu", "--dropout=0", "--val_fraction=0.2",
    f"--sources={TEXT.relative_to(ROOT)}",
]  # fmt: skip


def switches(config: Config) -> dict[str, object]:
    """Return the settings that decide which tensors a checkpoint has."""
    model = config.model
    return {
        "positions": model.positions,
        "n_previous": model.n_previous > 0,
        "norm": model.norm,
        "mlp": model.mlp,
        "bias": model.bias,
        "tied": model.tied,
        "optimizer": config.train.optimizer,
    }


def resumed_losses(path: Path, run: Path) -> dict[str, list[tuple[int, float]]]:
    """Resume a stored checkpoint in a new run folder; return the losses by tag."""
    run.mkdir()
    shutil.copyfile(path, run / LAST)
    code, output = train(run)
    assert code == 0, output
    values = scalars(run)
    return {tag: values[tag] for tag in ("train/loss", "val/loss")}


def store(recipe: str) -> None:
    """Store a tiny model with the switches of a recipe, and the losses after resuming it.

    A stored checkpoint never changes. Only its losses are recorded again, after a deliberate change
    of training.
    """
    path = STORED / f"{recipe}.safetensors"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not path.exists():
            stop_at(7, f"configs/{recipe}.yaml", *SMALLEST, f"--out_dir={folder / 'run'}")
            saved = load_checkpoint(folder / "run" / LAST)
            saved.settings = replace(saved.settings, out_dir="auto")
            write_atomic(path, to_bytes(saved))
        losses = resumed_losses(path, folder / "resumed")
    (STORED / f"{recipe}.json").write_text(json.dumps(losses, indent=1), encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_checkpoint_is_read_and_resumed_with_the_same_losses(name, tmp_path):
    path = STORED / f"{name}.safetensors"
    expected = json.loads((STORED / f"{name}.json").read_text(encoding="utf-8"))
    found = resumed_losses(path, tmp_path / "resumed")
    for tag, values in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in values]
        losses = [loss for _, loss in values]
        assert [loss for _, loss in found[tag]] == pytest.approx(losses, abs=1e-4)
    model, tokenizer = load_model(path)
    assert model.vocab_size == len(tokenizer)


def test_every_recipe_has_a_stored_checkpoint_with_its_switches():
    stored = [switches(load_checkpoint(STORED / f"{name}.safetensors").settings) for name in NAMES]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        assert switches(parse_train([str(path)]).new_settings()) in stored, (
            f"python -m tests.slow.test_stored {path.stem}"
        )


if __name__ == "__main__":
    store(sys.argv[1])
