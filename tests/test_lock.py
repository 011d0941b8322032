"""The lock of a run folder: one writer at a time, released when its process ends."""

import os
import re

import pytest

from common import lock
from common.errors import ResourceError, RunInUseError
from common.lock import only_writer
from tests.conftest import file_size_limit, printed
from tests.runs import raised, small_run_args, start


def error_message(folder):
    with pytest.raises(RunInUseError) as caught, only_writer(folder):
        pass
    assert caught.value.exit_code == 7
    return printed(caught.value)


def test_a_second_writer_gets_the_pid_and_start_time_of_the_first(tmp_path):
    with only_writer(tmp_path):
        message = (
            r"out_dir: \S+ is in use by pid (\d+) since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; "
            r"a folder has one writer at a time; wait for that process, stop it or choose another "
            r"--out_dir"
        )
        assert int(re.fullmatch(message, error_message(tmp_path))[1]) == os.getpid()
    with only_writer(tmp_path):
        pass


def test_of_two_simultaneous_starts_one_trains_and_the_other_names_it(tmp_path):
    words = [*small_run_args(tmp_path), "--max_iters=200", f"--out_dir={tmp_path / 'run'}"]
    starts = [start("train.py", *words) for _ in range(2)]
    outputs = {process: process.communicate()[0] for process in starts}
    first, second = sorted(starts, key=lambda process: process.returncode)
    assert (first.returncode, second.returncode) == (0, 7), outputs
    assert f"run is in use by pid {first.pid} since " in outputs[second]


class Failed(Exception):
    """A start that fails."""


def fail_in(folder):
    with pytest.raises(Failed), only_writer(folder):
        assert (folder / ".lock").exists()
        raise Failed


def test_an_exception_removes_the_lock_and_the_folders_that_are_new_and_empty(tmp_path):
    fail_in(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "notes.txt").write_text("mine")
    fail_in(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_exception_removes_no_lock_that_is_older_or_in_use(tmp_path):
    with only_writer(tmp_path):
        error_message(tmp_path)
        assert (tmp_path / ".lock").exists()
    fail_in(tmp_path)
    assert (tmp_path / ".lock").exists()


@pytest.mark.skipif(os.name == "nt", reason="a file that is open cannot be removed")
def test_a_lock_file_that_was_removed_before_it_was_locked_protects_nothing(tmp_path, monkeypatch):
    real = lock._lock_file

    def removed_and_locked(file):
        (tmp_path / ".lock").unlink()  # by the last holder, whose start failed
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(lock, "_lock_file", removed_and_locked)
        assert "failed at this moment; run the command again" in error_message(tmp_path)
    with only_writer(tmp_path):
        pass


def test_a_folder_that_cannot_be_created_is_a_resource_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError) as caught, only_writer(tmp_path / "file" / "run"):
        pass
    message = f"out_dir: cannot write to {tmp_path}/file/run (Not a directory); choose another "
    assert caught.value.exit_code == 5 and str(caught.value) == f"{message}--out_dir"


def test_the_content_of_the_lock_file_is_escaped_and_shortened_in_the_message(tmp_path):
    with only_writer(tmp_path):
        (tmp_path / ".lock").write_bytes(b"pid \x1b[2J\nerror: none\xff" + b"x" * 1000)
        message = error_message(tmp_path)
        assert r"in use by pid \x1b[2J\nerror: none" in message and len(message) < 400


NOT_LOCKS = {
    "a link": lambda path, target: path.symlink_to(target),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a file of another program": lambda path, _: path.write_text("precious"),
}


@pytest.mark.skipif(os.name == "nt", reason="pipes and links")
@pytest.mark.parametrize("kind", NOT_LOCKS)
def test_a_lock_that_is_not_ours_is_refused_and_not_touched(kind, tmp_path):
    precious, folder = tmp_path / "precious.txt", tmp_path / "run"
    precious.write_text("precious")
    folder.mkdir()
    NOT_LOCKS[kind](folder / ".lock", precious)
    before = (folder / ".lock").lstat()
    with pytest.raises(ResourceError, match=f"{folder}") as caught, only_writer(folder):
        pass
    assert caught.value.exit_code == 5 and precious.read_text() == "precious"
    after = (folder / ".lock").lstat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_full_disk_does_not_prevent_the_lock(tmp_path):
    with file_size_limit(0), only_writer(tmp_path):
        assert "in use by another process; a folder has one writer" in error_message(tmp_path)


def test_a_file_system_without_locks_allows_several_writers(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_lock_file", raised(OSError(95, "Operation not supported")))
    with only_writer(tmp_path), only_writer(tmp_path):
        pass
