"""The folder of a run: what a person or another program wrote is never changed or removed; every
command that is printed runs as it is.
"""

import os
import shlex
import sys

import pytest
from filelock import FileLock

from storage.folder import locked
from tests.runs import contents, raised, scalars, snapshot, step_of, stop_at, train
from training import state

SHORT = ["--max_iters=4", "--warmup_ratio=0", "--save_interval=2", "--cooldown_ratio=0"]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def options(options, run):
    return [*options, *SHORT, f"--out_dir={run}"]


# ----------------------------------------------------------------------------------------- the lock


def test_a_second_run_in_the_same_folder_is_refused(options, run):
    with locked(run):
        code, output = train(*options)
        assert code == 7 and f"out_dir: {run} is in use by another process; " in output
    assert train(*options)[0] == 0


def test_a_file_system_without_locks_is_a_note_whatever_its_error(options, monkeypatch, capsys):
    monkeypatch.setattr(FileLock, "acquire", raised(OSError(524, "no locks")))  # it has no name
    assert train(*options)[0] == 0
    assert "no locks on this file system: start one run at a time there" in capsys.readouterr().err


# -------------------------------------------------------------------------------- files of a person


def test_a_new_run_replaces_the_files_of_a_run_and_no_others(options, run):
    assert train(*options)[0] == 0
    (run / "best.safetensors.tmp").write_text("half, of a process that was killed")
    (run / "events.out.tfevents.1700000000.host.1.0").write_text("of a run that was killed")
    mine = {"notes.txt": "notes", "notes.tmp": "notes", "last.pt": "another program's"}
    for name, content in mine.items():
        (run / name).write_text(content)
    assert train(*options, "--max_iters=3", "--overwrite")[0] == 0
    assert step_of(run) == 3 and [step for step, _ in scalars(run)["train/loss"]] == [1, 2, 3]
    assert "\n4," not in (run / "metrics.csv").read_text()
    assert "max_iters: 3" in (run / "config.yaml").read_text()
    names = {path.name for path in run.iterdir() if "events" not in path.name}
    ours = {"last.safetensors", "best.safetensors", "config.yaml", ".lock"}
    assert names == ours | {"metrics.csv"} | mine.keys()
    assert {name: (run / name).read_text() for name in mine} == mine


def test_a_folder_with_a_run_is_only_overwritten_on_request(options, run):
    assert train(*options)[0] == 0
    before = snapshot(run)
    code, output = train(*options)
    assert code == 2 and output.startswith(f"error: out_dir: {run} already holds a run; --resume ")
    assert snapshot(run) == before


def test_a_log_whose_checkpoints_are_gone_is_only_removed_on_request(options, run):
    assert train(*options)[0] == 0
    for name in ("last.safetensors", "best.safetensors"):
        (run / name).unlink()
    before = snapshot(run)
    code, output = train(*options)
    assert code == 2 and f"out_dir: {run} holds the log of a run whose checkpoints are g" in output
    assert snapshot(run) == before

    code, output = train(*options, "--resume")  # as a scheduler does, after an early kill
    assert code == 0 and f"{run} has no run to resume: starting one" in output
    metrics = (run / "metrics.csv").read_bytes()
    assert metrics.startswith(before["metrics.csv"][1] + b"\n1,")
    assert before.keys() <= snapshot(run).keys()

    for name in ("last.safetensors", "best.safetensors"):
        (run / name).unlink()
    assert train(*options, "--overwrite")[0] == 0
    assert len((run / "metrics.csv").read_text().splitlines()) == 6
    assert len(list(run.glob("events.*"))) == 1


def test_a_config_that_a_user_wrote_is_left_alone_with_a_note(options, run, capsys):
    run.mkdir()
    (run / "config.yaml").write_text("# my own notes\nmax_iters: 7\n")
    assert train(*options)[0] == 0
    assert f"{run / 'config.yaml'} was not written by train.py" in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == "# my own notes\nmax_iters: 7\n"


@pytest.mark.parametrize(
    ("code", "words", "fault"),
    [
        (2, ["--n_head=5"], None),
        (4, ["--init_from=damaged"], None),
        (130, [], (state.Run, "__init__", raised(KeyboardInterrupt()))),
    ],
    ids=["a wrong setting", "a damaged checkpoint", "Ctrl-C"],
)
def test_a_start_that_fails_leaves_everything_as_it_was(
    code, words, fault, options, run, tmp_path, monkeypatch
):
    stop_at(3, *options)
    (run / "last.safetensors.tmp").write_text("of a process that was killed")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/config.yaml").write_text("# mine\n")
    (tmp_path / "damaged").touch()
    words = [word.replace("damaged", str(tmp_path / "damaged")) for word in words]
    if fault:
        monkeypatch.setattr(*fault)
    before = snapshot(tmp_path)
    for folder, action in (("new/run", []), ("others", []), ("run", ["--overwrite"])):
        actual, output = train(*options, *words, *action, f"--out_dir={tmp_path / folder}")
        assert actual == code, output
        assert snapshot(tmp_path) == before, folder


# ----------------------------------------------------------------------------------------- commands


@pytest.mark.skipif(os.name == "nt", reason="POSIX words")
def test_every_printed_command_means_the_folder_that_it_names(options, tmp_path, monkeypatch):
    """With Python and the script as they were typed."""
    python = ".venv/bin/python"
    monkeypatch.setattr(sys, "orig_argv", [python, "../hornbook/train.py"])
    monkeypatch.setattr(sys, "argv", ["../hornbook/train.py"])
    run = tmp_path / "it's in $HOME, ünï🙂"
    output = stop_at(1, *options, f"--out_dir={run}")
    resume = shlex.split(output.splitlines()[-1])
    assert resume == [python, "../hornbook/train.py", str(run)]
    code, output = train(run)
    assert code == 0 and step_of(run) == 4
    sample, tensorboard = (shlex.split(line) for line in output.splitlines()[-2:])
    assert sample == [python, "../hornbook/sample.py", "--ckpt", str(run)]
    assert tensorboard == [python, "-m", "tensorboard.main", "--logdir", str(tmp_path)]


def test_a_home_folder_is_expanded_and_the_setting_keeps_what_was_written(
    options, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    stop_at(1, *options, "--out_dir=~/run")
    assert contents(tmp_path / "run/last.safetensors")["settings"]["out_dir"] == "~/run"
    assert train("~/run")[0] == 0 and step_of(tmp_path / "run") == 4
