"""The console and the end of a command: what is escaped, and every exception's line and code."""

import errno
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from torch._inductor.exc import InductorError

from common.console import ConfigError, prepare_console, print_stderr, say
from common.messages import printable
from tests.conftest import ROOT, run_command
from tests.runs import exit_code, raised, sample_main, small_run_args, train_main

CONTROLS = [chr(code) for code in (*range(1, 32), *range(127, 160))]


class Stream(io.TextIOWrapper):
    """Standard output: a terminal, or a pipe."""

    def __init__(self, terminal: bool, encoding: str):
        super().__init__(io.BytesIO(), encoding, newline="\n")
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def shown_by(command, *argv, terminal: bool, encoding: str = "utf-8") -> str:
    """Run a command in this process; return what its standard output gets."""
    with redirect_stdout(Stream(terminal, encoding)) as stdout:
        assert command(argv) == 0
    return stdout.buffer.getvalue().decode(encoding if terminal else "utf-8")


@pytest.fixture(scope="module")
def controls(tmp_path_factory):
    """The folder of a run on control characters, and what it printed on a terminal."""
    folder = tmp_path_factory.mktemp("controls") / "\x1b[2J"
    folder.mkdir()
    text = "".join(CONTROLS) * 40 + "\nж"
    (folder / "text.txt").write_text(text, encoding="utf-8", newline="")
    run = folder.parent / "run"
    words = [*small_run_args(folder), "--max_iters=2", "--warmup_ratio=0", f"--out_dir={run}"]
    return run, shown_by(train_main, *words, terminal=True)


def test_console_escapes_control_characters(controls):
    """On a terminal; a pipe gets every one."""
    run, shown = controls
    assert "\n".join(map(printable, shown.split("\n"))) == shown and "\\x1b[2J/text.txt" in shown
    words = [f"--ckpt={run}", f"--prompt={CONTROLS[5]}", "--max_new_tokens=60"]
    piped = shown_by(sample_main, *words, terminal=False)
    assert len({*piped} & {*CONTROLS}) > 20
    shown = shown_by(sample_main, *words, terminal=True)
    assert shown == "\n".join(map(printable, piped.split("\n")))


def test_console_encoding(controls):
    """A pipe gets UTF-8, whatever the locale says, and a terminal what it has."""
    words = [f"--ckpt={controls[0]}", "--prompt=ж", "--max_new_tokens=0"]
    assert shown_by(sample_main, *words, terminal=False, encoding="cp1252") == "ж\n"
    assert shown_by(sample_main, *words, terminal=True, encoding="cp1252") == "\\u0436\n"


@pytest.mark.parametrize("stream", ["out", "err"])
def test_console_escapes_each_line(stream, capsys):
    """A newline in one begins no other."""
    {"out": say, "err": print_stderr}[stream]("a\nerror: b", Path("\x1b[2J\tc\rd\udcff"))
    shown = getattr(capsys.readouterr(), stream)
    assert shown == "a\\nerror: b\n\\x1b[2J\tc\\rd\\udcff\n"


def test_console_of_a_notebook(monkeypatch):
    """Its streams are no files."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    prepare_console()
    say("ж")
    print_stderr("ж")
    assert (sys.stdout.getvalue(), sys.stderr.getvalue()) == ("ж\n", "ж\n")


def test_error_in_ipython(tmp_path):
    """It is one line there too."""
    command = ["-m", "IPython", "--colors=NoColor", "-c", "%run train.py configs/\x1b.yaml"]
    shown = run_command(*command, IPYTHONDIR=str(tmp_path)).stdout
    assert shown.startswith("error: configs/\\x1b.yaml: is no config") and shown.count("\n") == 1


OUT_OF_MEMORY = r"error: out of memory \(.*[mM]emory.*\); choose a smaller batch_size, .* model\n"
ENDS = [  # exception, exit code, pattern of standard error
    (ConfigError("a: is wrong", "b: is wrong"), 2, "error: a: is wrong\nerror: b: is wrong\n"),
    (PermissionError(errno.EACCES, "Permission denied", "a"), 2,
     r"error: \[Errno 13\] Permission denied: 'a'\n"),
    (MemoryError(), 2, OUT_OF_MEMORY),
    (RuntimeError("CUDA out of memory. Tried to allocate 1 GiB.\nSee"), 2, OUT_OF_MEMORY),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 2, OUT_OF_MEMORY),
    (OSError(5, "Input/output error", "out of memory.txt"), 2, r"error: \[Errno 5\] .*\n"),
    (OSError("libgomp.so.1: cannot allocate memory in static TLS block"), 2,
     "error: libgomp.so.1: cannot allocate memory in static TLS block\n"),
    (InductorError(RuntimeError("No working C++ compiler found"), None), 2,
     r"error: compile: .*No working C\+\+ compiler found\); use --compile=false\n"),
    (KeyboardInterrupt(), 130, "\n"),
    (ZeroDivisionError("a bug"), 1, "(?s:Traceback .*ZeroDivisionError: a bug\n)"),
    # of a fork: its own file, its own module
    (FileNotFoundError(errno.ENOENT, "a bug", "own.txt"), 1, "(?s:Traceback .*: 'own.txt'\n)"),
    (ModuleNotFoundError("a bug", name="model.own"), 1, "(?s:Traceback .*Error: a bug\n)"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code", "said"), ENDS, ids=lambda value: type(value).__name__)
def test_end_of_a_command(error, code, said, capsys):
    """Every exception has its line and its exit code."""
    assert exit_code(raised(error), []) == code
    assert re.fullmatch(said, capsys.readouterr().err)


def test_end_without_a_reader():
    """It is silent."""
    code = "from common.console import *; prepare_console(); print_text('text')"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # then Python writes again as it exits
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=buffered, **pipes)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
