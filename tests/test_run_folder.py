"""The folder of a run: what a person or another program wrote is never changed or removed; every
command that is printed runs as it is.
"""

import errno
import os
import re
import shlex
import sys

import pytest

from storage.checkpoint import LAST
from storage.checks import locked
from tests.runs import raised, scalars, snapshot, step_of, stop_at, train
from training import state


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


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
        (run / LAST).unlink()
    assert train(*options)[0] == 0


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK], ids=errno.errorcode.get)
def test_folder_on_a_drive_without_locks(code, options, run, monkeypatch):
    """A note, and the run; no file is left that would lock the folder after a kill."""
    error = OSError(code, "no locks available")
    monkeypatch.setattr("fcntl.flock", raised(error))
    for _ in range(2):
        code, output = train(*options, "--overwrite")
        assert code == 0, output
        assert f"note: {run}: no locks on this drive (no locks available); " in output


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_folder_that_cannot_be_made(place, options, tmp_path):
    (tmp_path / "file").touch()
    code, output = train(*options, f"--out_dir={tmp_path / place}")
    line = rf"error: out_dir: {tmp_path / place}: (File exists|Not a directory); .*--out_dir\n"
    assert code == 2 and re.fullmatch(line, output)


def test_folder_is_overwritten_on_request(options, run):
    """The files of a run are replaced, and no others."""
    assert train(*options)[0] == 0
    before = snapshot(run)
    code, output = train(*options)
    assert code == 2 and output.startswith(f"error: out_dir: {run} already holds a run; ")
    assert snapshot(run) == before

    (run / "events.out.tfevents.1700000000.host.1.0").write_text("of a run that was killed")
    mine = {"notes.txt": "notes", "notes.tmp": "notes", "last.pt": "another program's"}
    for name, content in mine.items():
        (run / name).write_text(content)
    assert train(*options, "--max_iters=3", "--overwrite")[0] == 0
    assert step_of(run) == 3 and [step for step, _ in scalars(run)["train/loss"]] == [1, 2, 3]
    assert "\n4," not in (run / "metrics.csv").read_text()
    assert "max_iters: 3" in (run / "config.yaml").read_text()
    names = {path.name for path in run.iterdir() if "events" not in path.name}
    ours = {"last.safetensors", "best.safetensors", "config.yaml", ".lock", "metrics.csv"}
    assert names == ours | mine.keys()
    assert {name: (run / name).read_text() for name in mine} == mine


def test_folder_with_a_log_alone(options, run):
    """It is neither continued nor removed, but on request."""
    assert train(*options)[0] == 0
    for name in ("last.safetensors", "best.safetensors"):
        (run / name).unlink()
    before = snapshot(run)
    for command in options, [*options, "--resume"], [run]:
        code, output = train(*command)
        assert code == 2 and f"out_dir: {run} has a log, but its checkpoints are gone; " in output
        assert snapshot(run) == before
    assert train(*options, "--overwrite")[0] == 0


def test_folder_with_a_config_of_a_user(options, run):
    run.mkdir()
    (run / "config.yaml").write_text("# my own notes\nmax_iters: 7\n")
    assert train(*options)[0] == 0
    assert (run / "config.yaml").read_text() == "# my own notes\nmax_iters: 7\n"


@pytest.mark.parametrize(
    ("code", "words", "fault"),
    [
        (2, ["--n_head=5"], None),
        (2, ["--init_from=damaged"], None),
        (130, [], (state.Run, "__init__", raised(KeyboardInterrupt()))),
    ],
    ids=["a wrong setting", "a damaged checkpoint", "Ctrl-C"],
)
def test_folder_after_a_start_that_fails(code, words, fault, options, run, tmp_path, monkeypatch):
    """It is as it was."""
    stop_at(3, *options)
    (tmp_path / "others").mkdir()
    (tmp_path / "others/config.yaml").write_text("# mine\n")
    (tmp_path / "damaged").touch()
    words = [word.replace("damaged", str(tmp_path / "damaged")) for word in words]
    if fault:
        monkeypatch.setattr(*fault)
    before = snapshot(tmp_path)
    for folder, action in (("others", []), ("run", ["--overwrite"])):
        actual, output = train(*options, *words, *action, f"--out_dir={tmp_path / folder}")
        assert actual == code, output
        assert snapshot(tmp_path) == before, folder


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
