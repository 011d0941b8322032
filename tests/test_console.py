"""The console and the end of a command: what is escaped, and every exception's line and code."""

import errno
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.exc import InductorError

from common.console import ConfigError, print_stderr, say
from tests.conftest import ROOT, run_command
from tests.runs import exit_code, raised, sample_main
from tests.variants import random_model, save_model

SHOWN = [  # is it a terminal, its encoding, what it shows of "\x1b[2Jж\n"
    (True, "utf-8", "\\x1b[2Jж\n"),
    (True, "cp1252", "\\x1b[2J\\u0436\n"),
    (False, "cp1252", "\x1b[2Jж\n"),
]


@pytest.mark.parametrize(("terminal", "encoding", "shown"), SHOWN)
def test_console_text(terminal, encoding, shown, tmp_path, monkeypatch):
    """On a terminal, escapes and letters that it lacks are escaped; a pipe gets all, in UTF-8."""
    file = save_model(tmp_path / "a.safetensors", random_model(vocab_size=6), "\n\x1b2J[ж")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding)
    stdout.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", stdout)
    assert sample_main([f"--ckpt={file}", "--prompt=\x1b[2Jж", "--max_new_tokens=0"]) == 0
    assert stdout.buffer.getvalue().decode() == shown


def test_console_line(capsys):
    """A newline in one begins no other."""
    for write in (say, print_stderr):
        write("a\nerror: b", Path("\x1b[2J\tc\rd\udcff"))
    shown = "a\\nerror: b\n\\x1b[2J\tc\\rd\\udcff\n"
    assert capsys.readouterr() == (shown, shown)


def test_error_in_ipython(tmp_path):
    """It is one line there too."""
    command = ["-m", "IPython", "--colors=NoColor", "-c", "%run train.py configs/\x1b.yaml"]
    shown = run_command(*command, IPYTHONDIR=str(tmp_path)).stdout
    assert shown.startswith("error: configs/\\x1b.yaml: is no config") and shown.count("\n") == 1


OUT_OF_MEMORY = r"error: out of memory \(.*[mM]emory.*\); choose a smaller batch_size, .* model\n"
ENDS = [  # exception, exit code, pattern of standard error
    (ConfigError("a: is wrong", "b: is wrong"), 2, "error: a: is wrong\nerror: b: is wrong\n"),
    (MemoryError(), 2, OUT_OF_MEMORY),
    (RuntimeError("CUDA out of memory. Tried to allocate 1 GiB.\nSee"), 2, OUT_OF_MEMORY),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 2, OUT_OF_MEMORY),
    (OSError(5, "Input/output error", "out of memory.txt"), 2, r"error: \[Errno 5\] .*\n"),
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
