"""Fixtures of all tests: one thread, commands in a subprocess, a finished short run."""

import io
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. The commands under
# test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, str(ROOT))

from common.console import print_error  # noqa: E402
from common.words import escape_controls  # noqa: E402


def printed(error: Exception) -> str:
    """Return what the console prints for an error after `error: `: one line, escaped."""
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        print_error(error)
    line = stderr.getvalue().removeprefix("error: ").removesuffix("\n")
    assert escape_controls(line) == line
    return line


def run_command(*arguments, stdin: str | None = None, check: int = 0, **environment):
    """Run a script in the repository, which ends with the exit code `check` and no traceback."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=240,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def options(tmp_path):
    """The arguments of the small run, but for its folder."""
    from tests.runs import small_run_args

    return small_run_args(tmp_path)


@pytest.fixture
def train_run(options, tmp_path):
    """A function that trains the small run in its folder, with more options; see runs.train."""
    from tests.runs import train

    return lambda *more: train(*options, f"--out_dir={tmp_path / 'run'}", *more)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """The folder of the small run, trained without a stop; beside it, its stdout in printed.txt."""
    from tests.runs import small_run_args, train

    folder = tmp_path_factory.mktemp("uninterrupted")
    code, output = train(*small_run_args(folder), f"--out_dir={folder / 'run'}")
    assert code == 0, output
    (folder / "printed.txt").write_text(output)
    return folder / "run"


@pytest.fixture(scope="session")
def run():
    """A function that runs a script: `run("train.py", "configs/smoke.yaml")`."""
    return run_command


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """Train configs/smoke.yaml in float32; return its folder, with its stdout in printed.txt."""
    from tests.runs import train

    out = tmp_path_factory.mktemp("runs") / "smoke"
    code, output = train("configs/smoke.yaml", f"--out_dir={out}", "--dtype=float32")
    assert code == 0, output
    (out / "printed.txt").write_text(output)
    return out
