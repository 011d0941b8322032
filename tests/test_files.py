"""Atomic writes: a save that fails or is killed at any call leaves the old file or the new one."""

import os
import threading

import pytest
import torch

from checkpointing import file_format
from common import files
from common.errors import CheckpointError, ResourceError
from tests.conftest import file_size_limit
from tests.runs import raised
from tests.stress.kills import FAULTS, Killed, System

NAMES = LAST, PREV = ["last.safetensors", "prev.safetensors"]


def content(step):
    tensors = {"weights": torch.full((50,), float(step))}
    return file_format.to_bytes({"step": str(step)}, tensors)


def step_of(path):
    """Return the step of an undamaged checkpoint, None for a damaged or missing one."""
    try:
        metadata, tensors = file_format.read(path)
    except CheckpointError:
        return None
    step = int(metadata["step"])
    assert torch.equal(tensors["weights"], torch.full((50,), float(step)))
    return step


@pytest.fixture
def folder(tmp_path):
    """Create a run folder with saves of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, step)
    assert [step_of(tmp_path / name) for name in NAMES] == [2, 1]
    return tmp_path


def save(folder, step):
    files.write_atomic(folder / LAST, content(step), previous=folder / PREV)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_save_syncs_the_file_before_renaming_it_and_the_folder_afterwards(folder, monkeypatch):
    with monkeypatch.context() as patch:
        system = System(patch)
        save(folder, 3)
    new, old = "last.safetensors.tmp", "prev.safetensors.tmp"
    assert system.calls == [
        ("unlink", new),
        ("create", new),
        ("write",),
        ("fsync",),
        ("unlink", old),
        ("link", "last.safetensors", old),
        ("replace", new, "last.safetensors"),
        ("replace", old, "prev.safetensors"),
        ("unlink", old),
        ("open", folder.name),
        ("fsync",),
        ("close",),
        ("unlink", new),
    ]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize("damaged", [False, True], ids=["last-whole", "last-damaged"])
@pytest.mark.parametrize("fault", FAULTS, ids=["EIO", "ENOSPC", "kill"])
def test_if_a_save_fails_or_is_killed_at_any_call_the_old_or_the_new_file_is_intact(
    fault, damaged, links, folder, monkeypatch
):
    ended = 0
    for fatal in range(14):  # a save has 13 calls
        save(folder, 1)
        save(folder, 2)
        if damaged:
            (folder / LAST).write_bytes(b"")
        with monkeypatch.context() as patch:
            system = System(patch, fault, fatal)
            if not links:
                patch.setattr(os, "link", raised(PermissionError("no hard links here")))
            try:
                save(folder, 3)
            except Killed:
                ended += 1
            except ResourceError as error:
                ended += 1
                assert f".safetensors: not saved ({fault.strerror}): need 0.0 MB" in str(error)
                assert f"MB free at {folder}; earlier files are intact" in str(error)
                assert error.exit_code == 5 and names(folder) == NAMES
        done = [call for i, call in enumerate(system.calls) if i != fatal]
        replaced = any(call[0] == "replace" and call[2] == LAST for call in done)
        last, prev = (step_of(folder / name) for name in NAMES)
        assert last == (3 if replaced else None if damaged else 2)
        assert prev == 1 or last == 3
        save(folder, 4)  # removes what a killed one left
        assert names(folder) == NAMES
    assert ended >= 8


def test_a_disk_full_at_any_byte_leaves_the_old_file(folder):
    size = (folder / LAST).stat().st_size
    for room in range(0, size, size // 16):
        with file_size_limit(room), pytest.raises(ResourceError, match="not saved"):
            save(folder, 3)
        assert [step_of(folder / name) for name in NAMES] == [2, 1]
        assert names(folder) == NAMES


def test_a_concurrent_reader_sees_only_intact_files(folder):
    done = threading.Event()
    steps = []

    def reads():
        while not done.is_set():
            steps.append(step_of(folder / LAST))

    reader = threading.Thread(target=reads)
    reader.start()
    for step in range(3, 60):
        save(folder, step)
    done.set()
    reader.join()
    assert len(steps) > 5 and steps == sorted(steps) and None not in steps


# -------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("words", "wrong", "right"),
    [
        (["sample.py", "--ckpt="], "bst.safetensors", "best.safetensors"),
        (["train.py", "configs/smoke.yaml", "--init_from="], "shakespear", "shakespeare"),
    ],
)
def test_a_mistyped_checkpoint_or_run_gets_the_nearest_name(words, wrong, right, run, tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare.txt").write_text("")
    (tmp_path / "best.safetensors").write_text("")
    done = run(*words[:-1], f"{words[-1]}{tmp_path / wrong}", check=4)
    line = f"{tmp_path / wrong}: no such file or folder; did you mean {tmp_path / right}?"
    assert done.stderr == f"error: {line}\n"


@pytest.mark.parametrize("name", ["shakespeare", "quite different", "no/folder/run", "last.pt"])
def test_other_names_are_left_to_the_reader_of_checkpoints(name, tmp_path):
    (tmp_path / "shakespeare").mkdir()
    files.check_path_spelling(tmp_path / name)
