"""The folder of a run: what a person wrote, or another program, is never changed or removed; and
every command that is printed runs as it is.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from common.console import script_command
from tests.runs import (
    contents,
    raised,
    scalars,
    small_run_args,
    snapshot,
    start,
    step_of,
    stop_at,
    train,
)
from training import state

SHORT = ["--max_iters=4", "--warmup_ratio=0", "--save_interval=2", "--cooldown_ratio=0"]


@pytest.fixture
def options(tmp_path):
    return [*small_run_args(tmp_path), *SHORT, f"--out_dir={tmp_path / 'run'}"]


# ----------------------------------------------------------------------------------------- the lock


def test_of_two_simultaneous_starts_one_trains_and_the_other_is_refused(options, tmp_path):
    words = [*options, "--max_iters=200"]
    starts = [start("train.py", *words) for _ in range(2)]
    outputs = {process: process.communicate()[0] for process in starts}
    first, second = sorted(starts, key=lambda process: process.returncode)
    assert (first.returncode, second.returncode) == (0, 7), outputs
    assert f"out_dir: {tmp_path / 'run'} is in use by another process" in outputs[second]


@pytest.mark.parametrize("errno", [37, 38, 95, 9, 5, 524])  # ENOLCK, ENOSYS ..., EBADF, EIO
def test_a_file_system_without_locks_is_a_note_whatever_its_error(
    errno, options, monkeypatch, capsys
):
    monkeypatch.setattr(FileLock, "acquire", raised(OSError(errno, "no locks")))
    assert train(*options)[0] == 0
    assert "no locks on this file system: start one run at a time there" in capsys.readouterr().err


def test_a_lock_that_cannot_be_opened_is_an_error(options, tmp_path):
    (tmp_path / "run/.lock").mkdir(parents=True)
    code, output = train(*options)
    assert code == 5 and f"error: {tmp_path / 'run/.lock'}: " in output


# -------------------------------------------------------------------------------- files of a person


def test_a_new_run_replaces_the_files_of_a_run_and_no_others(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options)[0] == 0
    (run / "best.safetensors.tmp").write_text("half, of a process that was killed")
    (run / "events.out.tfevents.1700000000.host.1.0").write_text("of a run that was killed")
    (run / "config.yaml").write_text("# Written by train.py: of an earlier run\n")
    mine = {"notes.txt": "notes", "notes.tmp": "notes", "last.pt": "another program's"}
    for name, content in mine.items():
        (run / name).write_text(content)
    assert train(*options, "--max_iters=3", "--overwrite")[0] == 0
    assert step_of(run) == 3 and [step for step, _ in scalars(run)["train/loss"]] == [1, 2, 3]
    assert "\n4," not in (run / "metrics.csv").read_text()
    assert "max_iters: 3" in (run / "config.yaml").read_text()
    names = {path.name for path in run.iterdir() if "events" not in path.name}
    ours = {"last.safetensors", "prev.safetensors", "best.safetensors", "config.yaml", ".lock"}
    assert names == ours | {"metrics.csv"} | mine.keys()
    assert {name: (run / name).read_text() for name in mine} == mine


def test_a_config_that_a_user_wrote_is_left_alone_with_a_note(options, tmp_path, capsys):
    config = tmp_path / "run/config.yaml"
    assert train(*options)[0] == 0
    config.write_text("# my own notes\nmax_iters: 7\n")
    assert train(*options, "--overwrite")[0] == 0
    note = f"note: {config} was not written by train.py; it is left unchanged\n"
    assert note in capsys.readouterr().err
    assert config.read_text() == "# my own notes\nmax_iters: 7\n"


def test_a_folder_with_a_run_is_only_overwritten_on_request(train_run, tmp_path):
    run = tmp_path / "run"
    assert train_run()[0] == 0
    before = snapshot(run)
    assert train_run() == (
        2,
        f"error: out_dir: {run} already holds a run; --resume continues it, --overwrite replaces "
        "it, another --out_dir leaves it alone\n",
    )
    assert snapshot(run) == before


# ------------------------------------------------------------------------------ starts that fail


FAILING = {  # options, exit code, and what fails in the code
    "a wrong setting": (["--n_head=5"], 2, None),
    "a text that does not exist": (["--data.sources=nowhere"], 3, None),
    "a damaged checkpoint": (["--init_from=damaged"], 4, None),
    "Ctrl-C": ([], 130, (state.Run, "__init__", raised(KeyboardInterrupt()))),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_start_that_fails_leaves_everything_as_it_was(name, options, tmp_path, monkeypatch):
    stop_at(3, *options, f"--out_dir={tmp_path / 'saved'}")
    (tmp_path / "saved/last.safetensors.tmp").write_text("of a process that was killed")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/config.yaml").write_text("# mine\n")
    (tmp_path / "damaged").touch()
    words, code, fault = FAILING[name]
    words = [word.replace("damaged", str(tmp_path / "damaged")) for word in words]
    if fault:
        monkeypatch.setattr(*fault)
    starts = [("new/run", []), ("others", []), ("saved", ["--overwrite"])]
    if code in (2, 130):  # a resume has its own text, and ignores --init_from
        starts.append(("saved", ["--resume"]))
    before = snapshot(tmp_path)
    for folder, action in starts:
        text = [word for word in options if code != 3 or "sources" not in word]
        actual, output = train(*text, *words, *action, f"--out_dir={tmp_path / folder}")
        assert actual == code, output
        assert snapshot(tmp_path) == before, folder


# ----------------------------------------------------------------------------------------- commands


@pytest.mark.skipif(os.name == "nt", reason="POSIX words")
@pytest.mark.parametrize("name", ["with space", "$HOME", "it's", "auto", "ünï🙂"])
def test_every_printed_command_means_the_folder_that_it_names(name, options, tmp_path, monkeypatch):
    run = tmp_path / name
    output = stop_at(1, *options, f"--out_dir={run}")
    python, script, *words = shlex.split(output.splitlines()[-1])
    assert (python, Path(script).name, words) == (sys.orig_argv[0], "train.py", [str(run)])
    code, output = train(*words)
    assert code == 0 and step_of(run) == 4
    sample, tensorboard = (shlex.split(line) for line in output.splitlines()[-2:])
    assert Path(sample[1]).name == "sample.py" and sample[2:] == ["--ckpt", str(run)]
    assert tensorboard == [python, "-m", "tensorboard.main", "--logdir", str(tmp_path)]


def test_a_printed_command_has_python_and_the_script_as_they_were_typed(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "../hornbook/train.py"])
    monkeypatch.setattr(sys, "argv", ["../hornbook/train.py"])
    command = script_command("sample.py", "--ckpt", "out/my run")
    assert command == ".venv/bin/python ../hornbook/sample.py --ckpt 'out/my run'"


def test_a_home_folder_is_expanded_and_the_setting_keeps_what_was_written(
    options, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [*options[:-1], "--out_dir=~/mine"]
    stop_at(1, *words)
    run = tmp_path / "mine"
    assert contents(run / "last.safetensors")["config"]["out_dir"] == "~/mine"
    assert train("~/mine")[0] == 0 and step_of(run) == 4
    assert train(*options, "--init_from=~/mine")[0] == 0
