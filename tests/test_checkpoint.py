"""Checkpoints: any layout restores one, damaged and other files are refused by name, and `last`
stands in for a damaged `best`.
"""

import gzip
import io
import math
import pickle
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch

from common.errors import CheckpointError
from common.files import write_atomic
from configs.command import parse_train
from configs.schema import Config, ModelConfig
from model.attention import LAYOUTS
from storage import load_model
from storage.checkpoint import (
    BEST,
    LAST,
    SECTIONS,
    Checkpoint,
    capture,
    load_checkpoint,
    load_preferred,
    to_bytes,
)
from tests.conftest import printed
from tests.runs import contents, equal, write_checkpoint
from train import build_run
from training.distributed import World


@pytest.fixture
def folder(uninterrupted, tmp_path):
    """The folder of a finished run."""
    return shutil.copytree(uninterrupted, tmp_path / "run")


def resumed(folder, *options):
    """Build the run that is resumed from a folder."""
    return build_run(parse_train([str(folder), *options]), World())[0]


def error_message(call, *arguments):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    assert caught.value.exit_code == 4
    return printed(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_restored_in_any_layout_has_the_tensors_of_its_checkpoint(layout, folder):
    run = resumed(folder, f"--layout={layout}")
    assert run.model.config.layout == layout
    tensors = dict(sorted(capture(run).tensors.items()))
    assert equal(tensors, contents(folder / LAST)["tensors"])


def test_a_checkpoint_has_no_line_of_the_text(uninterrupted):
    lines = (uninterrupted.parent / "text.txt").read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > 20]
    for name in (BEST, LAST):
        content = (uninterrupted / name).read_bytes().decode("utf-8", errors="replace")
        assert len(long) > 50 and not any(line in content for line in long)


# ---------------------------------------------------------------------------- choosing a checkpoint


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_last_stands_in_for_a_damaged_best_with_one_line(damage, folder):
    for prefer in ("last", "best"):
        assert load_preferred(folder, prefer, pytest.fail).path.name.startswith(prefer)
    notes = []
    damage(folder / BEST)
    assert load_preferred(folder, "best", notes.append).path == folder / LAST
    (note,) = notes
    assert note.startswith(f"{folder / BEST}: ")
    assert note.endswith(f"; using {folder / LAST} instead")
    # a file given by name has no stand-in
    assert load_preferred(folder / LAST, "best", pytest.fail).path == folder / LAST
    assert error_message(load_preferred, folder / BEST, "best", pytest.fail)


@pytest.mark.parametrize("path", ["out", "out/typo"])
def test_the_error_for_a_missing_checkpoint_names_the_runs_that_are_there(
    path, folder, tmp_path, monkeypatch
):
    (tmp_path / "out").mkdir()
    folder.rename(tmp_path / "out" / "run")
    monkeypatch.chdir(tmp_path)
    message = error_message(load_preferred, Path(path), "last", pytest.fail)
    assert message == f"{Path(path)}: no checkpoint; runs that are there: {Path('out', 'run')}"


# ------------------------------------------------------------------------- damaged and other files


def write_small(folder):
    """Write a small checkpoint with characters of every kind; return its path."""
    tensors = {
        "model.a": torch.arange(6.0).reshape(2, 3),
        "model.b": torch.tensor([7.0]),
        "exp_avg.a": torch.full((2, 3), -0.5),
    }
    vocabulary = "\n \xe9\U0001f600\u2028\0\x1b</script>"[:12]
    path = folder / LAST
    write_atomic(path, to_bytes(Checkpoint(Config(), ModelConfig(), vocabulary, tensors)))
    return path


@pytest.fixture
def file(tmp_path):
    return write_small(tmp_path)


def test_a_checkpoint_file_loads_as_what_was_written(file):
    saved = load_checkpoint(file)
    write_atomic(file.with_name("again"), to_bytes(saved))
    assert equal(contents(file.with_name("again")), contents(file))
    assert saved.vocabulary.startswith("\n \xe9\U0001f600\u2028\0\x1b<")
    assert equal(saved.of_kind("model")["a"], torch.arange(6.0).reshape(2, 3))
    assert list(saved.of_kind("exp_avg")) == ["a"]


def assert_flipped_bits_are_refused(file, every):
    """But for the case of a hexadecimal digit: \\u001b and \\u001B are the same character."""
    content, whole = file.read_bytes(), contents(file)
    for position in range(0, len(content), every):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        if re.search(rb"\\u[0-9a-f]{0,3}$", content[position - 5 : position]):
            with suppress(CheckpointError):
                assert equal(contents(file), whole)
        else:
            assert error_message(load_checkpoint, file).startswith(f"{file}: ")


def test_a_flipped_bit_a_cut_and_an_appended_byte_are_refused(file):
    """tests/slow/test_damage.py goes through every byte."""
    content = file.read_bytes()
    assert_flipped_bits_are_refused(file, every=11)
    for damaged in (content[:-1], content[: len(content) // 2], content[:9], content + b"\n"):
        file.write_bytes(damaged)
        assert error_message(load_checkpoint, file).startswith(f"{file}: not a Hornbook checkpoint")


def pytorch_file():
    content = io.BytesIO()
    torch.save({"model": {"weight": torch.zeros(3)}, "iter_num": 7}, content)
    return content.getvalue()


OTHER_FILES = {
    "empty": b"",
    "text": b"First Citizen:\n" * 100,
    "gzip": gzip.compress(b"x" * 1000),
    "pickle": pickle.dumps({"model": [1, 2]}),
    "long header": (10**9).to_bytes(8, "little") + b'{"__metadata__":{}}',
    "PyTorch": pytorch_file(),
    "safetensors": safetensors.torch.save({"weight": torch.zeros(3)}, {"format": "pt"}),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_of_another_kind_is_refused_and_a_pickle_names_convert(kind, file):
    file.write_bytes(OTHER_FILES[kind])
    message = error_message(load_checkpoint, file)
    assert "not a Hornbook checkpoint" in message
    assert ("python convert.py imports" in message) == (kind in ("pickle", "PyTorch"))


def test_a_file_of_another_version_is_refused(file):
    for version in ("2", "4"):
        content = safetensors.torch.save({}, {"hornbook_format": version})
        file.write_bytes(content)
        message = error_message(load_checkpoint, file)
        assert message == f"{file}: made by another version of Hornbook; train again"


# ------------------------------------------------------------------------------ invalid checkpoints


@pytest.mark.parametrize(
    ("part", "value", "expected"),
    [
        ("settings", {"model": {"n_heads": 2}}, "settings: unknown setting 'n_heads'; "),
        ("vocabulary", "aba", "its content is invalid (ValueError: "),
        ("progress", {"step": -1}, "progress: step must be an integer of at least 0, but is -1"),
    ],
)
def test_an_invalid_part_is_refused_by_name(part, value, expected, folder):
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
        assert getattr(saved, name) == section()


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
@pytest.mark.parametrize("kind", ["model", "momentum"])
def test_an_invalid_tensor_is_refused_by_name(case, kind, folder):
    saved, name = contents(folder / LAST), "blocks.0.mlp.up"
    change, expected = WRONG_TENSORS[case]
    change(saved["tensors"], f"{kind}.{name}")
    write_checkpoint(folder / LAST, saved)
    message = error_message(resumed, folder)
    assert message == f"{folder / LAST}: {expected.format(n=f'{kind}.{name}')}"
    if kind == "model":
        message = error_message(load_model, folder / LAST)
        assert message == f"{folder / LAST}: {expected.format(n=name)}"
