"""Checkpoints: damage and foreign files are refused by name; `last` stands in for `best`."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.console import CheckpointError
from common.files import BEST, LAST
from configs.schema import Config
from storage.checkpoint import Checkpoint, load_checkpoint, load_for_sampling, load_model, to_bytes
from tests.runs import bits, build

VOCABULARY = "\0\n </script>\u2028"
A, HALF = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), -0.5)


@pytest.fixture
def folder(uninterrupted, tmp_path):
    """A copy of the folder of a finished run."""
    return shutil.copytree(uninterrupted, tmp_path / "run")


@pytest.fixture
def small(tmp_path):
    """The file of a small checkpoint; no escape in its JSON has letters, which may be capitals."""
    saved = Checkpoint(Config(), VOCABULARY, {"model.a": A, "exp_avg.a": HALF})
    (tmp_path / LAST).write_bytes(to_bytes(saved))
    return tmp_path / LAST


def error_message(call, *arguments):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    return str(caught.value)


def test_checkpoint_is_what_was_written(small):
    saved = load_checkpoint(small)
    assert replace(saved, tensors={}) == Checkpoint(Config(), VOCABULARY, {}, path=small)
    assert bits(saved.tensors_of_kind("model")) == bits({"a": A})
    assert bits(saved.tensors_of_kind("exp_avg")) == bits({"a": HALF})


def test_checkpoint_has_no_line_of_the_text(uninterrupted):
    text = (uninterrupted.parent / "text.txt").read_text(encoding="utf-8")
    long = [line.encode() for line in text.splitlines() if len(line) > 20]
    for name in (BEST, LAST):
        content = (uninterrupted / name).read_bytes()
        assert len(long) > 50 and not any(line in content for line in long)


def test_last_stands_in_for_best(folder):
    assert load_for_sampling(folder).path == folder / BEST
    (folder / BEST).unlink()
    assert load_for_sampling(folder).path == folder / LAST


def test_damaged_best_names_last(folder):
    (folder / BEST).write_bytes(b"")
    advice = f"; the newest weights are in {folder / LAST}"
    assert error_message(load_for_sampling, folder).endswith(advice)


@pytest.mark.parametrize("is_there", [False, True])
def test_resume_without_last_names_best(is_there, folder):
    """It is missing, as after convert.py, or damaged."""
    (folder / LAST).unlink()
    if is_there:
        (folder / LAST).touch()
    message = error_message(build, folder)
    assert message.startswith(f"{folder / LAST}: {'not a' if is_there else 'missing'}")
    options = shlex.split(message.partition("from the best weights: ")[2])[3:]
    assert options == [f"--init_from={folder}", f"--out_dir={folder}-2"]
    assert build("configs/smoke.yaml", *options).progress.step == 0


def test_missing_checkpoint_names_the_runs(folder, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    folder.rename(tmp_path / "out" / "run")
    monkeypatch.chdir(tmp_path)
    message = error_message(load_for_sampling, "typo")
    assert message == f"typo: no checkpoint; runs that are there: {Path('out', 'run')}"


# ------------------------------------------------------------------------------------------- damage


def test_damage_at_any_byte_is_refused(small):
    """A flipped bit; a cut, one byte more."""
    content = small.read_bytes()
    damaged = [b"", content[:-1], content[: len(content) // 2], content + b"\n"]
    for place in range(len(content)):
        flipped = bytes([content[place] ^ 1 << place % 8])
        damaged.append(content[:place] + flipped + content[place + 1 :])
    for each in damaged:
        small.write_bytes(each)
        assert error_message(load_checkpoint, small).startswith(f"{small}: not a Hornbook")


def test_other_version_is_refused(small, monkeypatch):
    monkeypatch.setattr("storage.checkpoint.FORMAT", "hornbook 5")
    line = f"{small}: not a Hornbook checkpoint of this version, or damaged ('hornbook 5')"
    assert error_message(load_checkpoint, small) == line


WRONG = [  # a part of a checkpoint, words of the error
    ({"settings": {"model": {"n_heads": 2}}}, "unknown setting 'n_heads'"),
    ({"settings": {"seed": -1}}, "seed must be an integer of at least 0 and at most"),
    ({"progress": {"steps": 1}}, "unexpected keyword argument 'steps'"),
    ({"text": None}, "object is not iterable"),
    ({"vocabulary": "aa"}, "the vocabulary must be one or more distinct characters"),
]


@pytest.mark.parametrize(("part", "words"), WRONG)
def test_wrong_content_is_refused(part, words, small):
    small.write_bytes(to_bytes(replace(load_checkpoint(small), **part)))
    message = error_message(load_checkpoint, small)
    assert message.startswith(f"{small}: not a Hornbook checkpoint ") and words in message


def test_missing_field_has_its_default(small):
    """As in the file of an earlier version."""
    before = load_checkpoint(small)
    small.write_bytes(to_bytes(replace(before, settings={}, progress={})))
    assert replace(load_checkpoint(small), tensors={}) == replace(before, tensors={})


@pytest.mark.parametrize("kind", ["model", "momentum_buffer"])
def test_wrong_tensor_is_refused(kind, folder):
    """One that is missing, that has another shape, that is unknown."""
    saved, mlp = load_checkpoint(folder / LAST), f"{kind}.blocks.0.mlp"
    del saved.tensors[f"{mlp}.down"]
    saved.tensors |= {f"{mlp}.up": torch.zeros(16, 64), f"{mlp}.upper": torch.zeros(1)}
    (folder / LAST).write_bytes(to_bytes(saved))
    wrong = f"{folder / LAST}: not as its settings describe: {mlp}.down, {mlp}.up, {mlp}.upper"
    assert error_message(build, folder) == wrong
    if kind == "model":
        assert error_message(load_model, folder / LAST) == wrong.replace("model.", "")
