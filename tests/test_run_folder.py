"""The folder of a run: what a person or another program wrote is never changed or removed; every
command that is printed runs as it is.
"""

import errno
import os
import shlex
import sys

import pytest

from storage.checkpoint import LAST
from storage.checks import locked
from tests.runs import raised, scalars, snapshot, step_of, stop_at, train
from tests.texts import write


@pytest.fixture
def options(options, run):
    return [*options, "--max_iters=4", "--warmup_ratio=0", "--cooldown_ratio=0", f"--out_dir={run}"]


def test_folder_in_use(options, run):
    """A second run is refused."""
    with locked(run):
        code, output = train(*options)
        assert code == 2 and f"out_dir: {run} is in use by another process; " in output
        (run / LAST).touch()  # a resume does not read what another process may still replace
        assert f"out_dir: {run} is in use by another process; " in train(run)[1]


def test_folder_on_a_drive_without_locks(options, run, monkeypatch):
    """A note, and the run."""
    monkeypatch.setattr("fcntl.flock", raised(OSError(errno.ENOLCK, "no locks available")))
    code, output = train(*options)
    assert code == 0 and f"note: {run}: no locks on this drive (no locks available); " in output


def test_folder_is_overwritten_on_request(options, run):
    """The files of a run are replaced, and no others."""
    assert train(*options)[0] == 0
    before = snapshot(run)
    code, output = train(*options)
    assert code == 2 and output.startswith(f"error: out_dir: {run} already holds a run; ")
    assert snapshot(run) == before

    mine = {"notes.txt": "notes", "notes.tmp": "notes", "last.pt": "another program's"}
    for name, content in mine.items():
        (run / name).write_text(content)
    assert train(*options, "--max_iters=3", "--overwrite")[0] == 0
    assert step_of(run) == 3 and [step for step, _ in scalars(run)["train/loss"]] == [1, 2, 3]
    assert "\n4," not in (run / "metrics.csv").read_text()
    assert "max_iters: 3" in (run / "config.yaml").read_text()
    assert {name: (run / name).read_text() for name in mine} == mine


def test_folder_with_a_config_of_a_user(options, run):
    write(run / "config.yaml", "# my own notes\nmax_iters: 7\n")
    assert train(*options)[0] == 0
    assert (run / "config.yaml").read_text() == "# my own notes\nmax_iters: 7\n"


def test_folder_after_a_start_that_fails(options, run, tmp_path, monkeypatch):
    """It is as it was, also if it was to be overwritten."""
    stop_at(3, *options)
    write(tmp_path / "others/config.yaml", "# mine\n")
    before = snapshot(tmp_path)
    monkeypatch.setattr("training.state.Run.__init__", raised(KeyboardInterrupt()))
    assert train(*options, "--overwrite")[0] == 130
    assert train(*options, f"--out_dir={tmp_path / 'others'}")[0] == 130
    assert snapshot(tmp_path) == before


# ----------------------------------------------------------------------------------------- commands


@pytest.mark.skipif(os.name == "nt", reason="POSIX words")
def test_printed_commands_name_the_folder(options, tmp_path, monkeypatch):
    python = ".venv/bin/python"
    monkeypatch.setattr(sys, "orig_argv", [python])  # as it was typed
    run = tmp_path / "it's in $HOME, ünï🙂"
    output = stop_at(1, *options, f"--out_dir={run}")
    assert shlex.split(output.splitlines()[-1]) == [python, "train.py", str(run)]
    code, output = train(run)
    assert code == 0 and step_of(run) == 4
    sample, tensorboard = (shlex.split(line) for line in output.splitlines()[-2:])
    assert sample == [python, "sample.py", "--ckpt", str(run)]
    assert tensorboard == [python, "-m", "tensorboard.main", "--logdir", str(tmp_path)]
