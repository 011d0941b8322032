"""Atomic writes: a save that fails or is killed at any call leaves the old file or the new one."""

import errno
import os
import stat
from contextlib import nullcontext

import pytest

from common import files
from common.errors import ResourceError
from tests.runs import raised
from tests.stress.kills import FAULTS, Killed, System

LAST = "last.safetensors"
CONTENTS = [b"%d" % step * 5000 for step in range(5)]  # of the checkpoints of steps 0 to 4


@pytest.fixture
def folder(tmp_path):
    """Create a run folder with a save of step 2."""
    save(tmp_path, 2)
    return tmp_path


def save(folder, step):
    files.write_atomic(folder / LAST, CONTENTS[step])


def step_of(folder):
    """Return the step of `last`; raise ValueError for a damaged one."""
    return CONTENTS.index((folder / LAST).read_bytes())


def test_a_save_syncs_the_file_before_renaming_it_and_the_folder_afterwards(folder, monkeypatch):
    with monkeypatch.context() as patch:
        system = System(patch)
        save(folder, 3)
    new = f"{LAST}.tmp"
    written = [("create", new), ("write",), ("fsync",), ("replace", new, LAST)]
    assert system.calls == [*written, ("open", folder.name), ("fsync",), ("close",)]


@pytest.mark.parametrize("fault", FAULTS, ids=["EIO", "ENOSPC", "kill"])
def test_if_a_save_fails_or_is_killed_at_any_call_the_old_or_the_new_file_is_whole(
    fault, folder, monkeypatch
):
    ended = 0
    for fatal in range(7):  # a save has 7 calls
        save(folder, 2)
        with monkeypatch.context() as patch:
            system = System(patch, fault, fatal)
            try:
                save(folder, 3)
            except Killed:
                ended += 1
            except ResourceError as error:
                ended += 1
                assert f"{LAST}: not saved ({fault.strerror}); earlier files" in str(error)
                assert error.exit_code == 5 and not (folder / f"{LAST}.tmp").exists()
        done = [call for i, call in enumerate(system.calls) if i != fatal]
        replaced = any(call[0] == "replace" for call in done)
        assert step_of(folder) == (3 if replaced else 2)
        save(folder, 4)  # removes what a killed one left
        assert [path.name for path in folder.iterdir()] == [LAST]
    assert ended >= 6


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EIO], ids=["EINVAL", "EIO"])
def test_only_a_folder_that_the_file_system_cannot_sync_is_no_failure(error, folder, monkeypatch):
    sync = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(error, os.strerror(error))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    refused = error == errno.EIO
    with pytest.raises(ResourceError, match="Input/output") if refused else nullcontext():
        save(folder, 3)
    assert step_of(folder) == 3


def test_on_windows_a_replace_that_is_denied_is_tried_again_for_two_seconds(folder, monkeypatch):
    waited, denied = [], PermissionError(errno.EACCES, "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr(files, "WINDOWS", True)
        patch.setattr(os, "replace", raised(denied))
        patch.setattr(files.time, "sleep", lambda _: patch.undo())  # it is allowed again
        save(folder, 3)
    assert step_of(folder) == 3

    monkeypatch.setattr(files.time, "sleep", waited.append)
    monkeypatch.setattr(os, "replace", raised(denied))
    for windows, seconds in ((False, 0), (True, 2)):
        monkeypatch.setattr(files, "WINDOWS", windows)
        with pytest.raises(ResourceError, match=r"not saved \(Permission denied\)"):
            save(folder, 4)
        assert sum(waited) == pytest.approx(seconds) and step_of(folder) == 3
