"""The process around a command: terminals, closed or full standard streams, signals at any moment
from the first line to the last, little memory, and messages of bounded length.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from checkpointing import file_format
from checkpointing.checkpoint import find
from common.console import MAX_LINE, escape, print_note, print_result, shorten
from common.errors import ResourceError, UserError
from tests.commands import exit_code, train_main
from tests.conftest import ROOT
from tests.runs import (
    ENVIRONMENT,
    count_checkpoints,
    merged,
    raised,
    small_run_args,
    start,
    step_of,
)

pty, tty = map(pytest.importorskip, ("pty", "tty"))  # POSIX streams and signals


def shell(command, **more):
    """Run a command line in the project's folder: exit code, stdout and stderr."""
    command = command.replace("python ", f"{sys.executable} ")
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=240,
        env=ENVIRONMENT | more,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


# ---------------------------------------------------------------------------------------- terminals


CONTROLS = [chr(code) for code in (*range(1, 32), *range(127, 160), 0x2028, 0x202E, 0x2066)]


def on_terminal(*words):
    """Run a command on a terminal; return its exit code and its standard output."""
    reader, writer = pty.openpty()
    tty.setraw(writer)  # no carriage return is added before newlines
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, stdout=writer,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(writer)
    content = b""
    with suppress(OSError):  # the end of a terminal's output
        while part := os.read(reader, 1 << 16):
            content += part
    os.close(reader)
    return process.wait(), content.decode()


def test_no_control_character_reaches_a_terminal_and_a_pipe_gets_every_byte(tmp_path):
    text, run = tmp_path / "\x1b[2J.txt", tmp_path / "run"
    text.write_text("".join(CONTROLS) * 40 + "\n", encoding="utf-8", newline="")
    words = [word for word in small_run_args(tmp_path) if "--data.sources" not in word]
    lengths = ["--max_iters=2", "--warmup_iters=0", "--cooldown_iters=0"]
    code, shown = on_terminal(
        *merged(["train.py", *words, *lengths, f"--data.sources={text}", f"--out_dir={run}"])
    )
    assert code == 0 and escape(shown, keep="\n") == shown and "\\x1b[2J.txt" in shown

    command = ["sample.py", f"--ckpt={run}", f"--prompt={CONTROLS[5]}", "--max_new_tokens=60"]
    code, shown = on_terminal(*command)
    raw = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, check=True
    ).stdout.decode()
    assert code == 0 and len({*raw} & {*CONTROLS}) > 20
    assert shown == escape(raw, keep="\n\t")


# ------------------------------------------------------------------------------------------ streams


def test_training_with_every_standard_stream_closed_trains(tmp_path):
    lengths = ["--max_iters=2", "--warmup_iters=0", "--cooldown_iters=0"]
    words = " ".join(merged([*small_run_args(tmp_path), *lengths]))
    run = tmp_path / "run"
    assert shell(f"python train.py {words} --out_dir={run} <&- >&- 2>&-") == (0, "", "")
    assert step_of(run) == 2 and count_checkpoints(run)[0] == count_checkpoints(run)[1]
    for path in run.iterdir():  # no file got the descriptor of standard output
        assert b"first loss" not in path.read_bytes() or "events" in path.name


def test_sampling_without_a_standard_output_is_one_line_and_exit_5(uninterrupted):
    command = f"python sample.py --ckpt={uninterrupted} --max-new-tokens=5 --device=cpu >&-"
    line = "error: standard output is closed; redirect it to a file or a program\n"
    assert shell(command) == (5, "", line)
    assert shell(f"{command} 2>&-")[0] == 5


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("command", ["train.py --help", "sample.py --help",
                                     "train.py configs/smoke.yaml --print-config",
                                     "sample.py --ckpt={run} --max-new-tokens=5"])  # fmt: skip
def test_a_full_disk_for_the_output_is_one_line_and_exit_5(command, buffering, uninterrupted):
    command = f"python {command.format(run=uninterrupted)} >/dev/full"
    assert shell(command, PYTHONUNBUFFERED=buffering) == (
        5,
        "",
        "error: standard output: cannot be written (No space left on device); redirect it "
        "elsewhere\n",
    )


def test_a_closed_standard_input_is_an_empty_one(uninterrupted):
    code, output, said = shell(f"python sample.py --ckpt={uninterrupted} --prompt=- "
                               "--max-new-tokens=5 --device=cpu <&-")  # fmt: skip
    assert (code, said) == (0, "") and len(output) == 6


@pytest.mark.parametrize(
    "command", ["sample.py --ckpt=/nowhere --top_k=x", "train.py nowhere.yaml"]
)
def test_an_error_that_nobody_reads_has_its_exit_code(command):
    assert shell(f"python {command} 2>&1 | true; exit ${{PIPESTATUS[0]}}") == (2, "", "")
    assert shell(f"python {command} 2>&-") == (2, "", "")
    assert shell(f"python {command} 2>/dev/full") == (2, "", "")


def test_ctrl_c_on_a_pipeline_whose_reader_has_gone_is_silent():
    code = ("import time; from common.process import start_command; start_command()\n"
            "time.sleep(0.5); print('text', end=''); raise KeyboardInterrupt")  # fmt: skip
    command = f'python -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    assert shell(command, PYTHONUNBUFFERED="") == (130, "", "")


# ------------------------------------------------------------------------------------------ signals


COMMANDS = ["train.py configs/smoke.yaml", "sample.py --ckpt=x"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("module", ["difflib", "yaml", "torch"])
def test_a_signal_during_the_imports_ends_the_process_at_once_without_a_traceback(
    module, name, command, tmp_path
):
    # `difflib` is imported before there is a handler: then the signal itself ends the process
    number = getattr(signal, name)
    code = -number if module == "difflib" else 130 if name == "SIGINT" else 143
    (tmp_path / f"{module}.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(9)"
    )
    assert shell(f"exec python {command}", PYTHONPATH=str(tmp_path)) == (code, "", "")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_thirty_signals_end_a_run_with_the_code_of_one_and_nothing_is_lost(name, code, tmp_path):
    lengths = ["--max_iters=100000", "--save_interval=2"]
    process = start("train.py", *small_run_args(tmp_path), *lengths, f"--out_dir={tmp_path}/run")
    next(line for line in process.stdout if line.startswith("step 6:"))
    for _ in range(30):
        process.send_signal(getattr(signal, name))
        time.sleep(0.01)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == code
    assert "Traceback" not in said and "KeyboardInterrupt" not in said
    there, good = count_checkpoints(tmp_path / "run")
    assert there == good >= 2 and step_of(tmp_path / "run") >= 4


# ------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("kilobytes", [300_000, 600_000])  # torch's libraries would abort
@pytest.mark.parametrize("command", COMMANDS)
def test_too_little_address_space_to_import_torch_is_one_line_and_exit_5(command, kilobytes):
    code, _, said = shell(f"ulimit -v {kilobytes}; python {command}")
    assert code == 5 and said.startswith("error: out of memory: ") and said.count("\n") == 1


OUT_OF_MEMORY = [
    MemoryError(),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_does_not_suffice_for_an_import_is_one_line_and_exit_5(error, capsys):
    assert exit_code(raised(error), []) == 5
    assert re.fullmatch(r"error: out of memory \(\w+\): .*\n", capsys.readouterr().err)


def test_a_checkpoint_larger_than_memory_is_named_as_that(uninterrupted, monkeypatch):
    monkeypatch.setattr(file_format, "read_regular", raised(MemoryError()))
    size = (uninterrupted / "best.safetensors").stat().st_size
    message = rf"best\.safetensors: its {size:,} bytes do not fit into memory"
    with pytest.raises(ResourceError, match=message):
        find(uninterrupted, "best")


def test_a_message_is_escaped_and_of_bounded_length_and_its_middle_left_out(capsys):
    error = UserError("begins\nerror: \x1b[2J" + "x" * 900_000 + "ends")
    assert exit_code(raised(error), []) == 2
    said = capsys.readouterr().err
    assert len(said) < MAX_LINE + 20
    assert said.startswith("error: begins\\nerror: \\x1b[2Jx") and said.endswith("ends\n")
    assert shorten("abc", 3) == "abc" and shorten("abcdef", 4) == "ab ... ef"


@pytest.mark.parametrize("stream", ["out", "err"])
def test_each_line_is_escaped_and_a_newline_in_it_begins_no_other(stream, capsys):
    print_lines = {"out": print_result, "err": print_note}[stream]
    print_lines("a\nerror: b", "\x1b[2J\t\u202e", Path("c\rd"))
    said = capsys.readouterr()
    assert getattr(said, stream) == "a\\nerror: b\n\\x1b[2J\\t\\u202e\nc\\rd\n"


@pytest.mark.parametrize("words", [
    ["x" * 900_000], ["configs/smoke.yaml", f"--{'x' * 900_000}=1"],
    ["configs/smoke.yaml", f"--out_dir={'x' * 90_000}"],
    ["configs/smoke.yaml", f"--resume={'y/' * 60_000}"],
], ids=["config", "option", "folder", "checkpoint"])  # fmt: skip
def test_an_argument_of_any_length_gets_a_short_answer(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    argv = [f"--out_dir={tmp_path / 'run'}", *words]
    assert exit_code(train_main, argv) in (2, 4, 5)
    out, err = capsys.readouterr()
    assert len(out) + len(err) < MAX_LINE + 20 and err.count("\n") == 1
