"""The folder of a run: what a person wrote, or another program, is never changed or removed; and
every command that is printed runs as it is.
"""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.console import path_word, program, script, shell_command
from configs.command import parse_sample_options, parse_train
from configs.schema import Config
from run import folder as run_folder
from run.checkpoint import text_info
from run.folder import write_settings
from tests.conftest import ROOT
from tests.runs import (
    SMALL,
    at_step,
    raised,
    scalars,
    small_run_args,
    snapshot,
    start,
    step_of,
    stop_at,
    train,
)
from tests.stress.kills import Killed
from training import state

SHORT = ["--max_iters=4", "--warmup_iters=0", "--save_interval=2", "--cooldown_iters=0"]


@pytest.fixture
def options(tmp_path):
    return [*small_run_args(tmp_path), *SHORT, f"--out_dir={tmp_path / 'run'}"]


def in_config(options):
    """Write the out_dir of `options` to a config file, where --resume may start a run in it."""
    option = options[-1]
    config = Path(option.partition("=")[2]).with_suffix(".yaml")
    settings = (ROOT / SMALL[0]).read_text(encoding="utf-8")
    config.write_text(f"{option.removeprefix('--').replace('=', ': ')}\n{settings}")
    return [config, *options[1:-1]]


def kill_at(step, *words):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        at_step(patch, step, raised(Killed()))
        train(*words)


# ----------------------------------------------------------------------------------------- the lock


def test_of_two_simultaneous_starts_one_trains_and_the_other_is_refused(options, tmp_path):
    words = [*options, "--max_iters=200"]
    starts = [start("train.py", *words) for _ in range(2)]
    outputs = {process: process.communicate()[0] for process in starts}
    first, second = sorted(starts, key=lambda process: process.returncode)
    assert (first.returncode, second.returncode) == (0, 7), outputs
    assert f"out_dir: {tmp_path / 'run'} is in use by another process" in outputs[second]


def test_a_killed_holder_leaves_no_lock(tmp_path):
    code = "from run.folder import only_writer; import os, sys, pathlib, signal\n"
    code += "with only_writer(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT)
    assert killed.returncode == -9 and (tmp_path / ".lock").exists()
    with run_folder.only_writer(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_note(number, tmp_path, monkeypatch, capsys):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", raised(OSError(number, os.strerror(number))))
    with run_folder.only_writer(tmp_path):
        assert "this file system has no locks" in capsys.readouterr().err


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
    assert "max_iters: 3" in (run / "config.yaml").read_text()
    names = {path.name for path in run.iterdir() if "events" not in path.name}
    ours = {"last.safetensors", "prev.safetensors", "best.safetensors", "config.yaml", ".lock"}
    assert names == ours | {"metrics.csv"} | mine.keys()
    assert {name: (run / name).read_text() for name in mine} == mine


@pytest.mark.parametrize("words", [[], ["--overwrite"]], ids=str)
def test_a_config_that_a_user_wrote_is_left_alone_with_a_note(words, options, tmp_path, capsys):
    config = tmp_path / "run/config.yaml"
    if words:
        assert train(*options)[0] == 0
    config.parent.mkdir(exist_ok=True)
    config.write_text("# my own notes\nmax_iters: 7\n")
    assert train(*options, *words)[0] == 0
    note = f"note: {config} was not written by train.py; it is left unchanged\n"
    assert note in capsys.readouterr().err
    assert config.read_text() == "# my own notes\nmax_iters: 7\n"


def test_the_settings_in_config_yaml_are_those_of_the_run(tmp_path):
    for seed in (1, 2):
        assert write_settings(tmp_path, Config(seed=seed)) is None
        assert parse_train([str(tmp_path / "config.yaml")]).new_settings().seed == seed


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


def test_after_an_edit_the_printed_command_resumes_with_the_settings_of_the_start(
    options, tmp_path
):
    output = stop_at(2, *options)
    config = tmp_path / "run/config.yaml"
    config.write_text(config.read_text().replace("seed: ", "seed: 9"))
    words = shlex.split(output.splitlines()[-1])
    assert words[1:3] == ["train.py", SMALL[0]] and words[-1] == "--resume"
    code, output = train(*words[2:])
    assert code == 0 and "seed 1" not in output and step_of(tmp_path / "run") == 4


# ------------------------------------------------------------------------------ starts that fail


FAILING = {  # options, exit code, and what fails in the code
    "a wrong setting": (["--n_head=5"], 2, None),
    "a text that does not exist": (["--data.sources=nowhere"], 3, None),
    "characters that a checkpoint lacks": (["--init_from={parent}"], 4, None),
    "Ctrl-C": ([], 130, (state.Run, "__init__", raised(KeyboardInterrupt()))),
}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run whose text has few characters."""
    folder = tmp_path_factory.mktemp("parent")
    (folder / "abc.txt").write_text("abc " * 200)
    words = [*SMALL, *SHORT, f"--data.sources={folder / 'abc.txt'}", f"--out_dir={folder / 'run'}"]
    assert train(*words)[0] == 0
    return folder / "run"


@pytest.mark.parametrize("name", FAILING)
def test_a_start_that_fails_changes_nothing_and_leaves_at_most_a_folder_with_its_lock(
    name, options, parent, tmp_path, monkeypatch
):
    kill_at(3, *options, f"--out_dir={tmp_path / 'saved'}")
    (tmp_path / "saved/last.safetensors.tmp").write_text("of a process that was killed")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/config.yaml").write_text("# mine\n")
    words, code, fault = FAILING[name]
    words = [word.format(parent=parent) for word in words]
    if any("--data.sources" in word for word in words):
        options = [word for word in options if not word.startswith("--data.sources")]
    if fault:
        monkeypatch.setattr(*fault)
    starts = [("new/run", []), ("others", []), ("saved", ["--overwrite"])]
    if code not in (3, 4):  # a resumed run refuses another text before it finds its fault
        starts.append(("saved", ["--resume"]))
    before = snapshot(tmp_path)
    for folder, action in starts:
        actual, output = train(*options, *words, *action, f"--out_dir={tmp_path / folder}")
        assert actual == code, output
        after = snapshot(tmp_path)
        assert before.items() <= after.items(), folder
        assert after.keys() - before.keys() <= {"new", "new/run", "new/run/.lock", "others/.lock"}


# ----------------------------------------------------------------------------------------- commands


@pytest.mark.skipif(os.name == "nt", reason="POSIX words")
@pytest.mark.parametrize("name", ["with space", "$HOME", "it's", "~", "-x", "auto", "ünï🙂"])
def test_every_printed_command_means_the_folder_that_it_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    write_settings(Path(name), Config())
    word = path_word(name)
    start = parse_train([path_word(f"{name}/config.yaml"), f"--out_dir={word}", "--seed=4"])
    _, train_script, *resumed = shlex.split(start.resume_command("--seed=5"))
    assert train_script == str(ROOT / "train.py")
    command = parse_train(resumed)
    assert Path(command.config_file).parent.samefile(name)
    assert command.resume == "auto" and command.options["seed"] == 5
    sample = shlex.split(shell_command([program("python"), script("sample.py"), "--ckpt", word]))
    for path in (command.out_dir, parse_sample_options(sample[2:]).ckpt, os.path.expanduser(word)):
        assert os.path.samefile(path, name)


def test_a_printed_command_starts_with_the_python_that_is_running(tmp_path, monkeypatch):
    folder = tmp_path / "environment" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    assert program("python") == str(folder / "python")
    monkeypatch.chdir(tmp_path)
    assert program("python") == os.path.join("environment", "bin", "python")
    monkeypatch.setenv("PATH", str(folder))
    assert program("python") == "python"


def test_a_printed_command_runs_from_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert script("train.py") == "train.py"
    monkeypatch.chdir(tmp_path)
    assert script("train.py") == str(ROOT / "train.py")
    (tmp_path / "train.py").write_text("")  # another program of that name
    assert script("train.py") == str(ROOT / "train.py")


def test_a_folder_whose_name_is_not_utf_8_is_saved_with_a_name_that_is():
    text = {"sha256": "0" * 64, "characters": 9, "val_sha256": None, "question": ""}
    corpus = SimpleNamespace(name="caf\udce9", **text)
    assert text_info(SimpleNamespace(corpus=corpus, planned_epochs=1.0)).name == "caf?"
