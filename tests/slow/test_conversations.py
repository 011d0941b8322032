"""Conversations: from a pipe, and on a terminal in a process of its own; Ctrl-C."""

import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from configs.schema import Config, DataConfig, ModelConfig
from model.gpt import GPT
from tests.conftest import ROOT
from tests.runs import run_sample, start
from tests.variants import save_model


@pytest.fixture
def sample_output(smoke):
    """A function that samples from the trained model: `sample_output("--prompt=a")`."""
    return lambda *words, **options: run_sample(smoke, *words, **options)[0]


def test_a_conversation_is_one_continuous_text(sample_output):
    output = sample_output("--interactive", "--max-new-tokens=20", stdin=b"ROMEO:\n\n")
    whole = sample_output("--prompt=\nROMEO:", "--max-new-tokens=40")[len("\nROMEO:") :]
    first = whole[:20] if whole[19] == "\n" else whole[:20] + "\n"
    assert output == first + whole[20:40] + ("" if whole[39] == "\n" else "\n")


def test_a_stop_string_is_printed_and_the_next_typed_line_continues_it(sample_output):
    options = ["--prompt=So", "--max-new-tokens=200"]
    text, shown, lines = "So", "So\n", ["it is", " of", "", "so"]
    for line in lines:  # each reply is that to all that is on the screen
        text += line if text.endswith("t") else f"\n{line}"
        reply = sample_output(f"--prompt={text}", "--max-new-tokens=200")[len(text) :]
        reply = reply[: reply.index("t") + 1]
        text, shown = text + reply, shown + reply
    typed = "\n".join(lines).encode()
    assert sample_output("--interactive", "--stop=t", *options, stdin=typed) == f"{shown}\n"


def test_a_stop_string_may_begin_in_the_reply_before_an_empty_line(sample_output):
    options = ["--interactive", "--max-new-tokens=20"]
    reply = sample_output("--prompt=\nROMEO:", "--max-new-tokens=40")[len("\nROMEO:") :]
    stop = reply[12:22]
    printed = sample_output(*options, f"--stop={stop}", stdin=b"ROMEO:\n\n")
    # each turn ends its line
    turns = [f"{turn}\n" if turn[-1] != "\n" else turn for turn in (reply[:20], reply[20:22])]
    assert printed == "".join(turns)


def test_a_refused_line_is_numbered_leaves_an_empty_one_and_ends_no_conversation(smoke):
    options = [smoke, "--interactive", "--max-new-tokens=30"]
    lines = ["Stay", "caf\xe9", "Stay"]
    typed = "\r\n".join(lines).encode("utf-8-sig") + b"\ncaf\xe9\n"
    out, err = run_sample(*options, stdin=typed, code=2)
    unknown, invalid = err.splitlines()
    assert unknown.startswith(
        "error: line 2: not in the vocabulary: '\xe9' (U+00E9) at position 3;"
    )
    assert invalid == "error: line 4: invalid byte at position 3; use UTF-8"
    first = run_sample(*options, stdin=b"Stay\n")[0]
    assert out.startswith(f"{first}\n") and out.endswith("\n\n")
    assert out.replace("\n\n", "\n") == run_sample(*options, stdin=b"Stay\nStay\n")[0]


def test_a_question_that_ends_in_a_newline_keeps_that_of_a_file_or_of_enter(tmp_path):
    data = DataConfig(separator="\\n\\n", answer_after="\\n")
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), 4)
    saved = save_model(tmp_path / "a.safetensors", model, "\n?ab", Config(data, model.config))
    (tmp_path / "question.txt").write_text("ab?\n")
    asked, _ = run_sample(saved, "--prompt=ab?\\n")
    assert asked.startswith("ab?\n")
    assert run_sample(saved, f"--prompt=FILE:{tmp_path / 'question.txt'}")[0] == asked
    reply, _ = run_sample(saved, "--interactive", stdin=b"ab?\n")
    assert reply.strip() == asked.removeprefix("ab?\n").strip()


def test_without_newlines_in_the_vocabulary_a_typed_line_continues_the_text(tmp_path):
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, bias=False), 4)
    saved = save_model(tmp_path / "dna.safetensors", model, "ACGT", Config(model=model.config))
    options = ["--max-new-tokens=2", "--seed=3", "--device=cpu", "--dtype=float32"]
    first, second = run_sample(saved, "--interactive", *options, stdin=b"CGT\nGGA\n")[0].split()
    # the first character is that of an empty prompt
    text = run_sample(saved, f"--prompt=ACGT{first}GGA", *options)[0]
    assert text == f"ACGT{first}GGA{second}\n"
    assert not first.endswith("A")


def shown(terminal: int, end: str) -> str:
    """Return what a terminal shows next, up to `end`."""
    content = b""
    while not content.endswith(end.encode()):
        assert select.select([terminal], [], [], 60)[0], content  # seconds
        content += os.read(terminal, 1)
    return content.decode(errors="backslashreplace").replace("\r\n", "\n")


@contextmanager
def conversation(*words, **streams):
    """Start a conversation on a terminal, which is also what is not among `streams`; yield both."""
    terminal, other_end = pytest.importorskip("pty").openpty()  # POSIX
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), other_end) | streams
    process = subprocess.Popen(
        [sys.executable, "sample.py", "--interactive", *words], cwd=ROOT, **streams
    )
    try:
        yield terminal, process
    finally:
        process.kill()
        process.wait()


HINT = "the model continues what you type; an empty line lets it go on; Ctrl-D ends\n"


def test_on_a_terminal_lines_are_edited_behind_a_stop_string_too_and_a_refused_one_ends_nothing(
    smoke,
):
    options = ["--max-new-tokens=200"]
    reply = run_sample(smoke, "--interactive", *options, stdin=b"ROMEO:")[0]
    end = reply.index("\n", 1) + 3  # of a stop string with the first two characters of a line
    stop = reply[end - 3 : end]
    with conversation(f"--ckpt={smoke}", *options, f"--stop={stop}") as (terminal, process):
        assert shown(terminal, "> ") == f"{HINT}> "
        os.write(terminal, b"caf\xffe\n")
        assert "error: line 1: invalid byte at position 3; use UTF-8\n" in shown(terminal, "\n> ")
        os.write(terminal, b"OMEO:" + b"\x1b[D" * 5 + b"R\n")  # five times the arrow to the left
        assert shown(terminal, stop).endswith(reply[:end])
        os.write(terminal, b"\x1b[A")  # the arrow up: the line before, behind the stop string
        assert shown(terminal, "ROMEO:") == "ROMEO:"
        os.write(terminal, b"\x15\x04")  # Ctrl-U deletes it, Ctrl-D ends
        assert process.wait() == 2


def test_on_a_terminal_enter_is_the_newline_with_which_a_reply_begins(smoke):
    options = ["--max-new-tokens=2", "--temperature=0"]
    assert run_sample(smoke, "--interactive", *options, stdin=b"ROMEO:")[0] == "\n\n"
    with conversation(f"--ckpt={smoke}", *options) as (terminal, _):
        shown(terminal, "> ")
        os.write(terminal, b"ROMEO:\n")
        assert shown(terminal, "> ") == "ROMEO:\n\n> "


def test_with_tee_hint_and_prompt_are_on_the_terminal_and_the_replies_in_the_log(smoke):
    options = [f"--ckpt={smoke}", "--max-new-tokens=30"]
    replies = run_sample(smoke, *options[1:], "--interactive", stdin=b"ROMEO:\n\n")[0]
    with conversation(*options, stdout=subprocess.PIPE) as (terminal, process):
        assert shown(terminal, "> ") == f"{HINT}> "
        os.write(terminal, b"ROMEO:\n")
        assert shown(terminal, "> ") == "ROMEO:\n> "
        os.write(terminal, b"\n")
        assert shown(terminal, "> ") == "\n> "
        os.write(terminal, b"\x04")
        assert process.stdout.read().decode() == f"{replies}\n"


def test_ctrl_c_ends_sampling_without_a_traceback(smoke):
    process = start("sample.py", f"--ckpt={smoke}", "--max-new-tokens=1000000000")
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate()[0] and process.returncode == 130
