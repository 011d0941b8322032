"""Fixtures of all tests: one thread, the options of a short run, and one that has finished."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
os.environ["OMP_NUM_THREADS"] = "1"  # bits depend on it; modules run side by side
# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. The commands under
# test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run_command(*words, check: int = 0, **environment) -> subprocess.CompletedProcess:
    """Run a script in the repository, which ends with the exit code `check` and no traceback."""
    command, pipes = [sys.executable, *map(str, words)], {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, timeout=240, env=os.environ | environment, **pipes)
    assert done.returncode == check and "Traceback" not in done.stderr, done
    return done


@pytest.fixture
def options(tmp_path):
    """The arguments of the small run, but for its folder."""
    from tests.runs import small_run_args

    return small_run_args(tmp_path)


@pytest.fixture
def run(tmp_path):
    """The folder of a run, which it makes."""
    return tmp_path / "run"


@pytest.fixture
def train_run(options, run):
    """A function that trains the small run in its folder, with more options; see runs.train."""
    from tests.runs import train

    return lambda *more: train(*options, f"--out_dir={run}", *more)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """The folder of the small run, trained without a stop; beside it, its stdout in printed.txt."""
    from tests.runs import small_run_args, train

    folder = tmp_path_factory.mktemp("uninterrupted")
    code, output = train(*small_run_args(folder), f"--out_dir={folder / 'run'}")
    assert code == 0, output
    (folder / "printed.txt").write_text(output)
    return folder / "run"
