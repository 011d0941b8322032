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
from configs.schema import Config
from tests.commands import exit_code, train_main
from tests.conftest import ROOT
from tests.runs import (
    ENVIRONMENT,
    count_checkpoints,
    merged,
    small_run_args,
    step_of,
    train,
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    words = [*small_run_args(folder), "--max_iters=2", "--warmup_iters=0", "--cooldown_iters=0"]
    assert train(*words, f"--out_dir={folder / 'run'}")[0] == 0
    return folder / "run"


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
    assert re.fullmatch(r"pid \d+ since [\d :-]+", (run / ".lock").read_text())


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (">&-", "error: standard output is closed; redirect it to a file or a program\n"),
        (">/dev/full", "error: standard output: cannot be written (No space left on device); "
                       "redirect it elsewhere\n"),
    ],
)  # fmt: skip
def test_sampling_without_an_output_is_one_line_and_exit_5(target, line, trained):
    command = f"python sample.py --ckpt={trained} --max-new-tokens=5 --device=cpu {target}"
    assert shell(command) == (5, "", line)
    assert shell(f"{command} 2>&-")[0] == 5


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("command", ["train.py --help", "sample.py --help",
                                     "train.py configs/smoke.yaml --print-config"])  # fmt: skip
def test_a_full_disk_for_the_output_is_one_line_and_exit_5(command, buffering):
    code, _, said = shell(f"python {command} >/dev/full", PYTHONUNBUFFERED=buffering)
    assert code == 5 and said.startswith("error: standard output: cannot be written")
    assert said.count("\n") == 1


def test_a_closed_standard_input_is_an_empty_one(trained):
    code, output, said = shell(f"python sample.py --ckpt={trained} --prompt=- "
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
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
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


@pytest.mark.parametrize("command", COMMANDS)
def test_an_ignored_signal_stays_ignored_during_the_imports(command, tmp_path):
    (tmp_path / "yaml.py").write_text(
        f"import os\nfor number in {int(signal.SIGINT)}, {int(signal.SIGHUP)}:\n"
        "    os.kill(os.getpid(), number)\nos._exit(9)"
    )
    line = f"trap '' INT HUP; exec python {command}"
    assert shell(line, PYTHONPATH=str(tmp_path)) == (9, "", "")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_thirty_signals_end_a_run_with_the_code_of_one_and_nothing_is_lost(name, code, tmp_path):
    process = subprocess.Popen(
        [sys.executable, *merged(["train.py", *small_run_args(tmp_path), "--max_iters=100000",
                                  "--save_interval=2", f"--out_dir={tmp_path / 'run'}"])],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    next(line for line in process.stdout if line.startswith("step 6:"))
    for _ in range(30):
        process.send_signal(getattr(signal, name))
        time.sleep(0.01)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in said and "KeyboardInterrupt" not in said
    there, good = count_checkpoints(tmp_path / "run")
    assert there == good >= 2 and step_of(tmp_path / "run") >= 4


# in Python's own start, before our first line
AT_COMPILE = "line 0, in <module>\nKeyboardInterrupt"


@pytest.mark.parametrize("seconds", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_ctrl_c_in_the_first_seconds_ends_a_command_without_a_traceback(
    script, seconds, trained, tmp_path
):
    words = {
        "train.py": [*small_run_args(tmp_path), f"--out_dir={tmp_path / 'run'}", "--max_iters=1e9"],
        "sample.py": [f"--ckpt={trained}", "--max_new_tokens=1e9"],
    }
    with subprocess.Popen(
        [sys.executable, script, *merged(words[script])],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)[1]
    before_our_first_line = AT_COMPILE in said or ("Traceback" in said and str(ROOT) not in said)
    assert before_our_first_line or "Traceback" not in said
    assert before_our_first_line or process.returncode in (130, -signal.SIGINT)
    there, good = count_checkpoints(tmp_path / "run")
    assert there == good


SHUTTING_DOWN = """
import atexit, os, signal, sys, time
from common.process import end_command, start_command
from common.signals import Stop

def main():
    with Stop() as stop:
        stop.defer_signals(verbose=False)
        os.kill(os.getpid(), signal.{name})
    {then}
    return stop.exit_code

def later():
    for _ in range(30):
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.001)

atexit.register(later)
start_command()
end_command(main())
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("then", ["pass", "os.kill(os.getpid(), signal.{name})"])
def test_signals_while_the_process_shuts_down_do_not_change_its_exit_code(name, code, then):
    source = SHUTTING_DOWN.format(name=name, then=then.format(name=name))
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


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
    def main(_):
        raise error

    assert exit_code(main, []) == 5
    assert re.fullmatch(r"error: out of memory \(\w+\): .*\n", capsys.readouterr().err)


def test_a_checkpoint_larger_than_memory_is_named_as_that(trained, monkeypatch, capsys):
    def too_large(*_, **__):
        raise MemoryError

    monkeypatch.setattr(file_format, "read_regular", too_large)
    with pytest.raises(ResourceError) as caught:
        find(trained, "best")
    size = (trained / "best.safetensors").stat().st_size
    assert f"best.safetensors: its {size:,} bytes do not fit into memory" in str(caught.value)


def test_a_limit_on_the_size_of_files_is_one_line_and_exit_5(tmp_path):
    words = " ".join(small_run_args(tmp_path))
    command = f"ulimit -f 0; python train.py {words} --out_dir={tmp_path / 'run'} 2>&1 | cat"
    code, _, _ = shell(f"{command}; exit ${{PIPESTATUS[0]}}")
    assert code == 5 and not (tmp_path / "run").exists()


def test_a_message_is_escaped_and_of_bounded_length_and_its_middle_left_out(capsys):
    def main(_):
        raise UserError("begins\nerror: \x1b[2J" + "x" * 900_000 + "ends")

    assert exit_code(main, []) == 2
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


LONG = "x" * 900_000


@pytest.mark.parametrize("words", [
    [LONG], ["configs/smoke.yaml", f"--out_dir={'x' * 90_000}"],
    ["configs/smoke.yaml", f"--{LONG}=1"],
    ["configs/smoke.yaml", f"--seed={LONG}"], ["configs/smoke.yaml", f"--resume={'y/' * 60_000}"],
    ["configs/smoke.yaml", f"--data.encoding={LONG}"],
])  # fmt: skip
def test_an_argument_of_any_length_gets_a_short_answer(words, capsys, monkeypatch, tmp_path):
    assert Config()  # the schema is loaded
    monkeypatch.chdir(ROOT)
    argv = [f"--out_dir={tmp_path / 'run'}", *words]
    assert exit_code(train_main, argv) in (2, 4, 5)
    out, err = capsys.readouterr()
    assert len(out) + len(err) < MAX_LINE + 20 and err.count("\n") == 1
