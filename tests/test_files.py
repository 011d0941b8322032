"""Atomic writes: a save that fails or is killed at any call leaves the old file or the new one."""

import errno
import io
import os
import threading
from pathlib import Path

import pytest
import torch

from checkpointing import file_format
from common import files
from common.errors import CheckpointError, ResourceError

# ------------------------------------------------------------------------------ simulated failures


NAMES = ["last.safetensors", "prev.safetensors"]


class Killed(BaseException):
    """The simulated end of the process: no further system call succeeds, not even for cleanup."""


class System:
    """The system calls of a save, listed in `calls`. Call number `fatal` raises `fault`."""

    def __init__(self, monkeypatch, fault=None, fatal=-1):
        self.calls, self.fault, self.fatal, self.dead = [], fault, fatal, False
        for name in ("link", "replace", "unlink", "fsync", "open", "close"):
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))
        monkeypatch.setattr(files, "open", self.opened, raising=False)

    def wrapped(self, name, call):
        def run(*arguments, **options):
            self.record(name, *arguments)
            return call(*arguments, **options)

        return run

    def opened(self, path, mode):
        if mode != "xb":
            return open(path, mode)
        self.record("create", path)
        return RecordedFile(path, self)

    def record(self, name, *arguments):
        if self.dead:
            raise Killed
        self.calls.append(
            (name, *(Path(each).name for each in arguments if isinstance(each, (str, Path))))
        )
        if len(self.calls) - 1 == self.fatal:
            self.dead = isinstance(self.fault, Killed)
            raise self.fault


class RecordedFile(io.FileIO):
    """A new file. A failing write has written half of the content."""

    def __init__(self, path, system):
        super().__init__(path, "xb")
        self.system = system

    def write(self, content):
        super().write(content[: len(content) // 2])
        self.system.record("write")
        return super().write(content[len(content) // 2 :])


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
    assert [step_of(tmp_path / name) for name in sorted(NAMES)] == [2, 1]
    return tmp_path


def save(folder, step):
    files.write_atomic(
        folder / "last.safetensors", content(step), previous=folder / "prev.safetensors"
    )


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


FATAL = range(14)  # a save has 13 calls


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize(
    "fault", [OSError(errno.ENOSPC, "No space left"), OSError(errno.EIO, "I/O error")], ids=str
)
def test_if_any_call_of_a_save_fails_the_old_or_new_file_is_intact(
    folder, monkeypatch, fault, links
):
    failed = 0
    for fatal in FATAL:
        save(folder, 1)
        save(folder, 2)
        with monkeypatch.context() as patch:
            system = System(patch, fault, fatal)
            if not links:
                patch.setattr(os, "link", no_hard_links)
            try:
                save(folder, 3)
            except ResourceError as error:
                failed += 1
                message = str(error)
                assert error.exit_code == 5 and "\n" not in message
                assert f".safetensors: not saved ({fault.strerror}): need 0.0 MB" in message
                assert f"MB free at {folder}; earlier files are intact" in message
        done = [call for i, call in enumerate(system.calls) if i != fatal]
        replaced = any(call[0] == "replace" and call[2] == "last.safetensors" for call in done)
        assert step_of(folder / "last.safetensors") == (3 if replaced else 2)
        assert step_of(folder / "prev.safetensors") in (1, 2)
        assert names(folder) == NAMES
    assert failed >= 8


def no_hard_links(*_):
    raise PermissionError(errno.EPERM, "no hard links here")


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize("damaged", [True, False], ids=["last-damaged", "last-whole"])
def test_a_process_killed_at_any_call_of_a_save_leaves_an_intact_file(
    folder, monkeypatch, damaged, links
):
    killed = 0
    for fatal in FATAL:
        save(folder, 1)
        save(folder, 2)
        if damaged:
            (folder / "last.safetensors").write_bytes(b"")
        with monkeypatch.context() as patch:
            System(patch, Killed(), fatal)
            if not links:
                patch.setattr(os, "link", no_hard_links)
            try:
                save(folder, 3)
            except Killed:
                killed += 1
        last, prev = step_of(folder / "last.safetensors"), step_of(folder / "prev.safetensors")
        assert last in ((None, 3) if damaged else (2, 3))
        assert prev == 1 or last == 3
        save(folder, 4)  # removes what the killed one left
        assert names(folder) == NAMES
    assert killed >= 12


def test_what_a_killed_process_left_does_not_block_a_save(folder):
    for name in NAMES:
        files.unfinished(folder / name).write_bytes(b"half")
    save(folder, 3)
    assert names(folder) == NAMES and step_of(folder / "last.safetensors") == 3


def test_a_disk_full_at_any_byte_leaves_the_old_file(folder):
    resource = pytest.importorskip("resource")
    size = (folder / "last.safetensors").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in range(0, size, size // 16):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(ResourceError, match="not saved"):
                save(folder, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [step_of(folder / name) for name in sorted(NAMES)] == [2, 1]
        assert names(folder) == NAMES


def test_a_missing_folder_is_a_resource_error(tmp_path):
    with pytest.raises(ResourceError, match="not saved") as caught:
        save(tmp_path / "gone", 1)
    assert caught.value.exit_code == 5


def test_a_concurrent_reader_sees_only_intact_files(folder):
    done = threading.Event()
    steps = []

    def reads():
        while not done.is_set():
            steps.append(step_of(folder / "last.safetensors"))

    reader = threading.Thread(target=reads)
    reader.start()
    for step in range(3, 60):
        save(folder, step)
    done.set()
    reader.join()
    assert len(steps) > 5 and steps == sorted(steps) and None not in steps


# -------------------------------------------------------------------------------------------- names


def test_a_mistyped_checkpoint_or_run_gets_the_nearest_name(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare.txt").write_text("")
    (tmp_path / "best.safetensors").write_text("")
    for wrong, right in (("shakespear", "shakespeare"), ("bst.safetensors", "best.safetensors")):
        with pytest.raises(CheckpointError) as caught:
            files.check_path_spelling(tmp_path / wrong)
        message = f"{tmp_path / wrong}: no such file or folder; did you mean {tmp_path / right}?"
        assert (str(caught.value), caught.value.exit_code) == (message, 4)


@pytest.mark.parametrize("name", ["shakespeare", "quite different", "no/folder/run", "last.pt"])
def test_other_names_are_left_to_the_reader_of_checkpoints(name, tmp_path):
    (tmp_path / "shakespeare").mkdir()
    files.check_path_spelling(tmp_path / name)


@pytest.mark.parametrize(
    "command", ["sample.py --ckpt=OUT/smok", "train.py configs/smoke.yaml --init_from=OUT/smok"]
)
def test_the_commands_answer_a_mistyped_run_before_they_import_torch(command, tmp_path, run):
    (tmp_path / "smoke").mkdir()
    words = command.replace("OUT", str(tmp_path)).split()
    done = run(*words, check=4)
    assert done.stderr.endswith(f"did you mean {tmp_path / 'smoke'}?\n")
    assert done.stderr.count("\n") == 1
