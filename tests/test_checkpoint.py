"""Checkpoints: exact round trips, errors that name the invalid part, and fall-back to an older
checkpoint of the folder.
"""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import CheckpointError, NonFiniteError
from common.files import write_atomic
from configs.schema import Config, ModelConfig, TrainConfig
from data.batches import Split
from data.tokenizer import CharTokenizer
from model.attention import LAYOUTS
from run import checkpoint as checkpoints
from run.checkpoint import BEST, LAST, PREV
from tests.conftest import printed
from tests.runs import contents, equal, write_checkpoint
from training.device import select_runtime
from training.state import Run

VOCABULARY = "\n abc"
MUON = Config(model=ModelConfig(n_layer=2, n_head=2, n_embd=8, block_size=4, bias=True))
CONFIG = dataclasses.replace(MUON, train=TrainConfig(optimizer="adamw"))
TEXT = {"name": "plays", "sha256": "0" * 64, "val_sha256": None, "characters": 1000}
TRAIN = Split(np.arange(40) % len(VOCABULARY), ((0, 40),))
CORPUS = SimpleNamespace(tokenizer=CharTokenizer(VOCABULARY), train=TRAIN, question="", **TEXT)
RUNTIME = select_runtime("cpu", "float32")


def new_run(config=CONFIG):
    return Run(config, CORPUS, RUNTIME)


def trained_checkpoint(config=CONFIG, step=3):
    """Return the checkpoint of a run after `step` steps."""
    run, generator = new_run(config), torch.Generator().manual_seed(1)
    for _ in range(step):
        ids = torch.randint(len(VOCABULARY), (3, 5), generator=generator)
        logits = run.model(ids[:, :4])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.progress.step += 1
    return checkpoints.capture(run)


def write(path, checkpoint, **options):
    write_atomic(path, checkpoints.to_bytes(checkpoint), **options)


def restore(saved, config=None):
    run = Run(config or saved.config, CORPUS, RUNTIME)
    checkpoints.restore(saved, run)
    return run


def error_message(call, *arguments):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    assert caught.value.exit_code == 4
    return printed(caught.value)


# -------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("step", [0, 3])
def test_a_run_restored_in_any_layout_has_the_tensors_of_its_checkpoint(config, step):
    saved = trained_checkpoint(config, step)
    for layout in LAYOUTS:
        model = dataclasses.replace(config.model, attention=layout)
        run = restore(saved, dataclasses.replace(config, model=model))
        assert run.model.config.attention == layout
        assert equal(checkpoints.capture(run).tensors, saved.tensors)


def test_a_compiled_model_is_saved_under_the_names_of_the_original_one():
    run = new_run()
    compiled = torch.compile(run.model)
    assert any("_orig_mod" in name for name in compiled.state_dict())
    assert not any("_orig_mod" in name for name in checkpoints.capture(run).tensors)


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
def test_non_finite_moments_are_never_captured(config):
    run = new_run(config)
    moments = next(iter(run.optimizers[-1].state.values()))
    moments[run.optimizers[-1].moments[0]].view(-1)[3] = -math.inf
    with pytest.raises(NonFiniteError, match="the weights are no longer finite"):
        checkpoints.capture(run)


# ---------------------------------------------------------------------------- choosing a checkpoint


@pytest.fixture
def folder(tmp_path):
    """A run folder with prev at step 1, last at step 2 and best at step 1."""
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (1, 2):
        write(folder / LAST, trained_checkpoint(step=step), previous=folder / PREV)
    write(folder / BEST, trained_checkpoint(step=1))
    return folder


DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(path.read_bytes().replace(b"n_layer", b"n_lay\xe5r")),
    "foreign": lambda path: torch.save({"model": {}}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "prefer, damaged, chosen",
    [
        ("last", [LAST], PREV),
        ("last", [LAST, PREV], BEST),
        ("last", [BEST], LAST),
        ("best", [BEST], LAST),
        ("best", [BEST, LAST], PREV),
        ("best", [LAST, PREV], BEST),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_another_one_with_one_line(
    folder, damage, prefer, damaged, chosen
):
    for name in damaged:
        DAMAGE[damage](folder / name)
    notes = []
    saved = checkpoints.find(folder, prefer, notify=notes.append)
    assert saved.path == folder / chosen
    assert saved.progress.step == (2 if chosen == LAST else 1)
    if chosen.startswith(prefer):
        assert notes == []
    else:
        (note,) = notes
        assert note.startswith(f"{folder / damaged[0]}: ")
        assert note.endswith(f"; using {folder / chosen} instead")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_given_by_name_is_loaded_or_refused(folder, damage):
    assert checkpoints.find(folder / LAST, "last", pytest.fail).path == folder / LAST
    DAMAGE[damage](folder / LAST)
    message = error_message(checkpoints.find, folder / LAST, "last", pytest.fail)
    assert message.startswith(f"{folder / LAST}: ") and PREV not in message


@pytest.mark.parametrize("path", ["out", "out/empty", "out/typo", "run", "out/typo/best"])
def test_the_error_for_a_missing_checkpoint_names_the_runs_that_are_there(
    path, folder, tmp_path, monkeypatch
):
    (tmp_path / "out" / "empty").mkdir(parents=True)
    folder.rename(tmp_path / "out" / "run")
    monkeypatch.chdir(tmp_path)
    message = error_message(checkpoints.find, Path(path), "last", pytest.fail)
    assert message == f"{Path(path)}: no checkpoint; runs that are there: {Path('out', 'run')}"


# ------------------------------------------------------------------------------ invalid checkpoints


INVALID = "its content is invalid"
WRONG_PARTS = [  # the part, its new value or what changes in it, and words of the message
    ("config", None, f"{INVALID} (KeyError: 'config')"),
    ("config", {"model": {"n_heads": 2}}, "config: unknown key 'n_heads'; did you mean n_head?"),
    ("config", {"model": {"n_layer": -1}}, "config: n_layer must be an integer of at least 1, but"),
    ("vocabulary", "aba", f"{INVALID} (ValueError: "),
    ("data", {"sha256": 7}, "data: sha256 must be a string, "),
    ("progress", {"step": -1}, "progress: step must be an integer of at least 0, but is -1"),
    ("progress", {"best_step": 2}, "progress: best_step 2, last_eval_step 0 and step 3 contradict"),
]


@pytest.mark.parametrize(("part", "change", "expected"), WRONG_PARTS)
def test_an_invalid_part_is_rejected_by_name(part, change, expected, tmp_path):
    write(tmp_path / LAST, trained_checkpoint())
    changed = contents(tmp_path / LAST)
    if change is None:
        del changed[part]
    else:
        changed[part] = changed[part] | change if isinstance(change, dict) else change
    write_checkpoint(tmp_path / LAST, changed)
    message = error_message(checkpoints.load, tmp_path / LAST)
    assert message.startswith(f"{tmp_path / LAST}: ") and expected in message


def test_a_field_that_is_missing_takes_its_default(tmp_path):
    """Files of an earlier program lack the settings and fields that were added since."""
    path = tmp_path / LAST
    write(path, trained_checkpoint())
    changed = contents(path)
    for section in checkpoints.SECTIONS:
        changed[section].clear()
    write_checkpoint(path, changed)
    saved = checkpoints.load(path)
    for name, section in checkpoints.SECTIONS.items():
        assert getattr(saved, name) == section()


NAME = "blocks.1.mlp.up"  # (32, 8)
WRONG_TENSORS = {
    "missing": (lambda t, n: t.pop(n), "missing: {n}; unknown: none"),
    "unknown": (lambda t, n: t.update({n + "x": torch.zeros(1)}), "missing: none; unknown: {n}x"),
    "shape": (
        lambda t, n: t.update({n: torch.zeros(8, 32)}),
        "{n} is (8, 32), its config describes (32, 8)",
    ),
    "NaN": (lambda t, n: t[n][3, 4].fill_(math.nan), "not finite: {n}"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
@pytest.mark.parametrize("role", ["model", "exp_avg", "exp_avg_sq"])
def test_an_invalid_tensor_is_rejected_by_name(case, role):
    saved, name = trained_checkpoint(), f"{role}.{NAME}"
    change, expected = WRONG_TENSORS[case]
    change(saved.tensors, name)
    calls = [restore] + ([checkpoints.build_model] if role == "model" else [])
    for call in calls:
        message = error_message(call, saved)
        named = name if call is restore else NAME
        assert message.startswith("checkpoint: ") and expected.format(n=named) in message
