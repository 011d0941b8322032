"""The console and the end of a command: what is escaped, and every exception's line and code."""

import errno
import io
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from common.console import escape, prepare_console, print_result, print_stderr
from common.errors import ConfigError, RunInUseError
from tests.commands import exit_code, sample_main, train_main
from tests.conftest import ROOT, run_command
from tests.runs import ENVIRONMENT, raised, small_run_args

REQUIREMENTS = re.findall(r"^\w+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)


def command(*words, check=0, **environment):
    """Run a script of the project: stdout and stderr."""
    done = run_command(*words, check=check, **environment)
    return done.stdout, done.stderr


def on_terminal(*words, **environment):
    """Run a script of the project on a terminal; return its exit code and its standard output."""
    pty, tty = map(pytest.importorskip, ("pty", "tty"))  # POSIX
    reader, writer = pty.openpty()
    tty.setraw(writer)  # no carriage return is added before newlines
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=ENVIRONMENT | environment, stdout=writer,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(writer)
    content = b""
    with suppress(OSError):  # the end of a terminal's output
        while part := os.read(reader, 1 << 16):
            content += part
    os.close(reader)
    return process.wait(), content.decode()


# ---------------------------------------------------------------------------------------- encodings


CONTROLS = [chr(code) for code in (*range(1, 32), *range(127, 160))]


@pytest.fixture(scope="module")
def controls(tmp_path_factory):
    """The folder of a run on control characters, and what it printed on a terminal."""
    folder = tmp_path_factory.mktemp("controls") / "\x1b[2J"
    folder.mkdir()
    text = "".join(CONTROLS) * 40 + "\nж"
    (folder / "text.txt").write_text(text, encoding="utf-8", newline="")
    lengths = ["--max_iters=2", "--warmup_ratio=0", "--cooldown_ratio=0"]
    run = folder.parent / "run"
    code, shown = on_terminal("train.py", *small_run_args(folder), *lengths, f"--out_dir={run}")
    assert code == 0
    return run, shown


def test_no_control_character_reaches_a_terminal_and_a_pipe_gets_every_one(controls):
    run, shown = controls
    assert escape(shown, keep="\n") == shown and "\\x1b[2J/text.txt" in shown
    words = ["sample.py", f"--ckpt={run}", f"--prompt={CONTROLS[5]}", "--max_new_tokens=60"]
    code, shown = on_terminal(*words)
    piped, _ = command(*words)
    assert code == 0 and len({*piped} & {*CONTROLS}) > 20
    assert shown == escape(piped, keep="\n\t")


def test_a_pipe_gets_utf_8_whatever_the_locale_says_and_a_terminal_what_it_has(controls):
    words = ["sample.py", f"--ckpt={controls[0]}", "--prompt=ж", "--max_new_tokens=0"]
    assert command(*words, PYTHONIOENCODING="cp1252") == ("ж\n", "")
    assert on_terminal(*words, PYTHONIOENCODING="cp1252") == (0, "\\u0436\n")


@pytest.mark.parametrize("stream", ["out", "err"])
def test_each_line_is_escaped_and_a_newline_in_it_begins_no_other(stream, capsys):
    print_lines = {"out": print_result, "err": print_stderr}[stream]
    print_lines("a\nerror: b", "\x1b[2J\t", Path("c\rd\udcff"))
    said = capsys.readouterr()
    assert getattr(said, stream) == "a\\nerror: b\n\\x1b[2J\\t\nc\\rd\\udcff\n"


# --------------------------------------------------------------------------------- standard streams


def test_a_stream_that_is_no_file_as_in_a_notebook_stays_as_it_is(monkeypatch):
    stdout, stderr = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    prepare_console()
    print_result("ж")
    print_stderr("ж")
    assert (stdout.getvalue(), stderr.getvalue()) == ("ж\n", "ж\n")


def test_a_run_is_trained_and_sampled_without_standard_streams(options, tmp_path, monkeypatch):
    run = tmp_path / "run"
    commands = [(train_main, [*options, "--max_iters=2", f"--out_dir={run}"]),
                (sample_main, [f"--ckpt={run}", "--prompt=-", "--max_new_tokens=5"]),
                (sample_main, [f"--ckpt={run}", "--interactive"])]  # fmt: skip
    for command, argv in commands:
        for name in ("stdin", "stdout", "stderr"):
            monkeypatch.setattr(sys, name, None)
        assert exit_code(command, argv) == 0
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            assert stream.name == os.devnull
            stream.close()


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_fault(closing):
    words = f"exec {sys.executable} train.py configs/smoke.yaml --print_config {closing}"
    done = subprocess.run(["sh", "-c", words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("data:\n") == (">&-" not in closing.split())


# ----------------------------------------------------------------------------- the end of a command


ENDS = [  # exception, exit code, pattern of standard error
    (ConfigError("a: is wrong", "b: is wrong"), 2, "error: a: is wrong\nerror: b: is wrong\n"),
    (RunInUseError("out: is in use"), 7, "error: out: is in use\n"),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "a\nb"), 5,
     r"error: a\\nb: No such file or directory\n"),
    (OSError(errno.ENOSPC, "No space left on device"), 5, "error: No space left on device\n"),
    (MemoryError(), 5, "error: out of memory; .*\n"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 5, "error: out of memory; .*\n"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), 5,
     "error: out of memory; .*\n"),
    (RuntimeError("CUDA out of memory. Tried to allocate 1 GiB."), 5, "error: out of memory; .*\n"),
    (KeyboardInterrupt(), 130, "\n"),
    (ZeroDivisionError("a bug"), 1, "(?s:Traceback .*ZeroDivisionError: a bug\n)"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code", "said"), ENDS, ids=lambda value: type(value).__name__)
def test_every_exception_has_its_line_and_its_exit_code(error, code, said, capsys):
    assert exit_code(raised(error), []) == code
    assert re.fullmatch(said, capsys.readouterr().err)


@pytest.mark.parametrize("package", REQUIREMENTS)
def test_a_missing_package_is_one_line_that_names_the_requirements(package, tmp_path):
    module = {"pyyaml": "yaml"}.get(package, package)
    missing = f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')"
    (tmp_path / f"{module}.py").write_text(missing)
    run = tmp_path / "run"
    out, said = command(
        "train.py", "configs/smoke.yaml", f"--out_dir={run}", check=5, PYTHONPATH=str(tmp_path)
    )
    assert not out and not run.exists()
    line = rf"error: No module named '{module}'; .* -m pip install -r requirements\.txt"
    assert re.fullmatch(line, said.splitlines()[-1])  # torch warns before it, if it has no numpy


def test_a_reader_that_has_gone_ends_the_command_in_silence():
    code = "from common.console import *; prepare_console(); print_text('text')"
    buffered = ENVIRONMENT | {"PYTHONUNBUFFERED": ""}  # then Python writes again as it exits
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=buffered, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
