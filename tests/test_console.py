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

from common.console import (
    prepare_console,
    print_result,
    print_stderr,
    script_command,
    shell_command,
)
from common.errors import ConfigError
from common.words import escape_controls
from tests.commands import exit_code, sample_main, train_main
from tests.conftest import ROOT
from tests.runs import ENVIRONMENT, raised, small_run_args

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


# ---------------------------------------------------------------------------------------- encodings


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


def test_no_control_character_reaches_a_terminal_and_a_pipe_gets_every_one(controls):
    run, shown = controls
    assert escape_controls(shown, keep="\n") == shown and "\\x1b[2J/text.txt" in shown
    words = [f"--ckpt={run}", f"--prompt={CONTROLS[5]}", "--max_new_tokens=60"]
    piped = shown_by(sample_main, *words, terminal=False)
    assert len({*piped} & {*CONTROLS}) > 20
    assert shown_by(sample_main, *words, terminal=True) == escape_controls(piped, keep="\n\t")


def test_a_pipe_gets_utf_8_whatever_the_locale_says_and_a_terminal_what_it_has(controls):
    words = [f"--ckpt={controls[0]}", "--prompt=ж", "--max_new_tokens=0"]
    assert shown_by(sample_main, *words, terminal=False, encoding="cp1252") == "ж\n"
    assert shown_by(sample_main, *words, terminal=True, encoding="cp1252") == "\\u0436\n"


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


@pytest.mark.parametrize("caller", ["", "mine.py", "/site-packages/ipykernel_launcher.py"])
def test_a_command_that_a_prompt_a_script_or_a_notebook_prints_names_the_script(
    caller, monkeypatch
):
    monkeypatch.setattr(sys, "argv", [caller])
    assert script_command("sample.py").endswith(f" {ROOT / 'sample.py'}")


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rules")
def test_a_shell_reads_the_words_of_a_printed_command_which_has_double_quotes_where_it_can():
    words = ["a", "a b", "a/*.md", "it's", "", 'a "b"', "$HOME", "`ls`", "a b!", r"\n", "~", "#;"]
    command = shell_command(["printf", "%s|", *words])
    printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout
    assert printed.split("|") == [*words, ""]
    assert shell_command(["a", "a b", "a/*.md", "it's"]) == 'a "a b" "a/*.md" "it\'s"'


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


# ----------------------------------------------------------------------------- the end of a command


ENDS = [  # exception, exit code, pattern of standard error
    (ConfigError("a: is wrong", "b: is wrong"), 2, "error: a: is wrong\nerror: b: is wrong\n"),
    (PermissionError(errno.EACCES, "Permission denied", "a\nb"), 5,
     r"error: a\\nb: Permission denied\n"),
    (MemoryError(), 5, "error: out of memory; choose .* model\n"),
    (RuntimeError("CUDA out of memory. Tried to allocate 1 GiB.\nSee"), 5,
     r"error: out of memory; .* model \(CUDA out of memory\. Tried to allocate 1 GiB\.\)\n"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 5,
     r"error: out of memory; .* \(.*DefaultCPUAllocator: can't allocate memory\)\n"),
    (OSError("libgomp.so.1: cannot allocate memory in static TLS block"), 5,
     "error: libgomp.so.1: cannot allocate memory in static TLS block\n"),
    (KeyboardInterrupt(), 130, "\n"),
    (ZeroDivisionError("a bug"), 1, "(?s:Traceback .*ZeroDivisionError: a bug\n)"),
    # of a fork: its own file, its own module
    (FileNotFoundError(errno.ENOENT, "a bug", "own.txt"), 1, "(?s:Traceback .*: 'own.txt'\n)"),
    (ModuleNotFoundError("a bug", name="model.own"), 1, "(?s:Traceback .*Error: a bug\n)"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code", "said"), ENDS, ids=lambda value: type(value).__name__)
def test_every_exception_has_its_line_and_its_exit_code(error, code, said, capsys):
    assert exit_code(raised(error), []) == code
    assert re.fullmatch(said, capsys.readouterr().err)


def test_a_reader_that_has_gone_ends_the_command_in_silence():
    code = "from common.console import *; prepare_console(); print_text('text')"
    buffered = ENVIRONMENT | {"PYTHONUNBUFFERED": ""}  # then Python writes again as it exits
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=buffered, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
