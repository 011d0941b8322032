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
from storage import load_model
from storage.checkpoint import BEST, LAST, SECTIONS, capture, load_checkpoint, load_preferred
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
    run = resumed(folder, f"--layout={layout}")
    assert run.model.config.layout == layout
    assert equal(capture(run).tensors, contents(folder / LAST)["tensors"])


def test_a_checkpoint_has_no_line_of_the_text(uninterrupted):
    lines = (uninterrupted.parent / "text.txt").read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > 20]
    for name in (BEST, LAST, PREV):
        content = (uninterrupted / name).read_bytes().decode("utf-8", errors="replace")
        assert len(long) > 50 and not any(line in content for line in long)


# ---------------------------------------------------------------------------- choosing a checkpoint


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [Path.unlink, cut])
@pytest.mark.parametrize(
    ("prefer", "damaged", "chosen"),
    [("last", [LAST], PREV), ("best", [BEST], LAST), ("best", [BEST, LAST], PREV)],
)
def test_a_damaged_checkpoint_falls_back_to_another_one_with_one_line(
    prefer, damaged, chosen, damage, folder
):
    notes = []
    assert load_preferred(folder, prefer, notes.append).path.name.startswith(prefer)
    assert notes == []
    for name in damaged:
        damage(folder / name)
    assert load_preferred(folder, prefer, notes.append).path == folder / chosen
    (note,) = notes
    assert note.startswith(f"{folder / damaged[0]}: ")
    assert note.endswith(f"; using {folder / chosen} instead")


def test_a_file_given_by_name_is_loaded_or_refused(folder):
    assert load_preferred(folder / LAST, "last", pytest.fail).path == folder / LAST
    cut(folder / LAST)
    message = error_message(load_preferred, folder / LAST, "last", pytest.fail)
    assert message == f"{folder / LAST}: checksum mismatch: the file is damaged or incomplete"


@pytest.mark.parametrize("path", ["out", "out/typo", "run"])
def test_the_error_for_a_missing_checkpoint_names_the_runs_that_are_there(
    path, folder, tmp_path, monkeypatch
):
    (tmp_path / "out").mkdir()
    folder.rename(tmp_path / "out" / "run")
    monkeypatch.chdir(tmp_path)
    message = error_message(load_preferred, Path(path), "last", pytest.fail)
    assert message == f"{Path(path)}: no checkpoint; runs that are there: {Path('out', 'run')}"


# ------------------------------------------------------------------------------ invalid checkpoints


UNKNOWN = "unknown setting 'n_heads'; the checkpoint may be from a newer version"
WRONG_PARTS = [  # the part, its new value, words of the message
    ("config", {"model": {"n_heads": 2}}, f"config: {UNKNOWN}"),
    ("vocabulary", "aba", "its content is invalid (ValueError: "),
    ("progress", {"step": -1}, "progress: step must be an integer of at least 0, but is -1"),
]


@pytest.mark.parametrize(("part", "value", "expected"), WRONG_PARTS)
def test_an_invalid_part_is_rejected_by_name(part, value, expected, folder):
    write_checkpoint(folder / LAST, contents(folder / LAST) | {part: value})
    message = error_message(load_checkpoint, folder / LAST)
    assert message.startswith(f"{folder / LAST}: {expected}")


def test_a_field_that_is_missing_takes_its_default(folder):
    """Files of an earlier program lack the settings and fields that were added since."""
    changed = contents(folder / LAST)
    for section in SECTIONS:
        changed[section].clear()
    write_checkpoint(folder / LAST, changed)
    saved = load_checkpoint(folder / LAST)
    for name, section in SECTIONS.items():
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
    message = error_message(resumed, folder)
    assert message == f"{folder / LAST}: {expected.format(n=f'{role}.{name}')}"
    if role == "model":
        message = error_message(load_model, folder / LAST)
        assert message == f"{folder / LAST}: {expected.format(n=name)}"
