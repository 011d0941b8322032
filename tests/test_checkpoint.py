"""Checkpoints: any layout restores one, an error names the invalid part, and another checkpoint of
the folder stands in for a damaged one.
"""

import math
import shutil
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError
from configs.command import parse_train
from model.attention import LAYOUTS
from run import checkpoint as checkpoints
from run import load_model
from run.checkpoint import BEST, LAST, PREV
from tests.conftest import printed
from tests.runs import contents, equal, write_checkpoint
from train import build
from training.distributed import World


@pytest.fixture
def folder(uninterrupted, tmp_path):
    """The folder of a finished run, with last, prev and best."""
    return shutil.copytree(uninterrupted, tmp_path / "run")


def resumed(folder, *options):
    """Build the run that is resumed from a folder."""
    return build(parse_train([str(folder), *options]), World())[0]


def error_message(call, *arguments):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    assert caught.value.exit_code == 4
    return printed(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_restored_in_any_layout_has_the_tensors_of_its_checkpoint(layout, folder):
    run = resumed(folder, f"--attention={layout}")
    assert run.model.config.attention == layout
    assert equal(checkpoints.capture(run).tensors, contents(folder / LAST)["tensors"])


# ---------------------------------------------------------------------------- choosing a checkpoint


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


def test_the_best_weights_are_no_place_to_resume_but_can_start_a_new_run(folder):
    for name in (LAST, PREV):
        DAMAGE["cut"](folder / name)
    message = error_message(checkpoints.find, folder, "last", pytest.fail)
    damaged = "checksum mismatch: the file is damaged or incomplete; "
    faults = [f"{folder / name}: {damaged}" for name in (LAST, PREV)]
    assert message == "".join(
        [*faults, f"to start a new run from its best weights: --init_from={folder}"]
    )


# ------------------------------------------------------------------------------ invalid checkpoints


INVALID = "its content is invalid"
WRONG_PARTS = [  # the part, its new value or what changes in it, and words of the message
    ("config", None, f"{INVALID} (KeyError: 'config')"),
    (
        "config",
        {"model": {"n_heads": 2}},
        "config: unknown setting 'n_heads'; the checkpoint may be from a newer version",
    ),
    ("config", {"model": {"n_layer": -1}}, "config: n_layer must be an integer of at least 1, but"),
    ("vocabulary", "aba", f"{INVALID} (ValueError: "),
    ("data", {"sha256": 7}, "data: sha256 must be a string, "),
    ("progress", {"step": -1}, "progress: step must be an integer of at least 0, but is -1"),
]


@pytest.mark.parametrize(("part", "change", "expected"), WRONG_PARTS)
def test_an_invalid_part_is_rejected_by_name(part, change, expected, folder):
    changed = contents(folder / LAST)
    if change is None:
        del changed[part]
    else:
        changed[part] = changed[part] | change if isinstance(change, dict) else change
    write_checkpoint(folder / LAST, changed)
    message = error_message(checkpoints.load, folder / LAST)
    assert message.startswith(f"{folder / LAST}: ") and expected in message


def test_a_field_that_is_missing_takes_its_default(folder):
    """Files of an earlier program lack the settings and fields that were added since."""
    changed = contents(folder / LAST)
    for section in checkpoints.SECTIONS:
        changed[section].clear()
    write_checkpoint(folder / LAST, changed)
    saved = checkpoints.load(folder / LAST)
    for name, section in checkpoints.SECTIONS.items():
        assert getattr(saved, {"config": "settings", "data": "text"}.get(name, name)) == section()


WRONG_TENSORS = {
    "missing": (lambda t, n: t.pop(n), "missing: {n}; unknown: none"),
    "unknown": (lambda t, n: t.update({n + "x": torch.zeros(1)}), "missing: none; unknown: {n}x"),
    "shape": (
        lambda t, n: t.update({n: torch.zeros(16, 64)}),
        "{n} is (16, 64), its config describes (64, 16)",
    ),
    "NaN": (lambda t, n: t[n][3, 4].fill_(math.nan), "not finite: {n}"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
@pytest.mark.parametrize("role", ["model", "momentum"])
def test_an_invalid_tensor_is_rejected_by_name(case, role, folder):
    saved, name = contents(folder / LAST), "blocks.0.mlp.up"
    change, expected = WRONG_TENSORS[case]
    change(saved["tensors"], f"{role}.{name}")
    write_checkpoint(folder / LAST, saved)
    (folder / PREV).unlink()
    message = error_message(resumed, folder)
    assert message == f"{folder / LAST}: {expected.format(n=f'{role}.{name}')}"
    if role == "model":
        message = error_message(load_model, folder / LAST)
        assert message == f"{folder / LAST}: {expected.format(n=name)}"
