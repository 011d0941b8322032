"""Conversations: from a pipe, and on a terminal in a process of its own; Ctrl-C."""

import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.conftest import ROOT
from tests.runs import run_sample, start


@pytest.fixture
def sample_output(uninterrupted):
    """A function that samples from the trained model: `sample_output("--prompt=a")`."""
    return lambda *words, **options: run_sample(uninterrupted, *words, **options)[0]


def ended(text):
    return text if text.endswith("\n") else f"{text}\n"


def test_conversation_is_one_text(sample_output):
    output = sample_output("--interactive", "--max-new-tokens=20", stdin=b"So it is\n\n")
    whole = sample_output("--prompt=\nSo it is", "--max-new-tokens=40")[len("\nSo it is") :]
    assert output == ended(whole[:20]) + ended(whole[20:40])


def test_conversation_with_a_stop_string(sample_output):
    """It ends a reply, and the next typed line continues it."""
    options = ["--prompt=So", "--max-new-tokens=200"]
    text, shown, lines = "So", "So\n", ["it is", " of", "", "so"]
    for line in lines:  # each reply is that to all that is on the screen
        text += line if text.endswith("t") else f"\n{line}"
        reply = sample_output(f"--prompt={text}", "--max-new-tokens=200")[len(text) :]
        reply = reply[: reply.index("t") + 1]
        text, shown = text + reply, f"{shown}{reply}\n"
    typed = "\n".join(lines).encode()
    assert sample_output("--interactive", "--stop=t", *options, stdin=typed) == shown


def test_conversation_leaves_out_unknown(uninterrupted):
    """Characters and invalid bytes; a mark at the beginning is none of the text."""
    options = [uninterrupted, "--interactive", "--max-new-tokens=30"]
    typed = "\r\n".join(["St\xe9ay", "Stay"]).encode("utf-8-sig") + b"\nSta\xffy\n"
    out, err = run_sample(*options, stdin=typed)
    assert out == run_sample(*options, stdin=b"Stay\nStay\nStay\n")[0]
    assert err.replace("left out, never read: ", "") == "'\xe9' (U+00E9)\n'\\udcff' (U+DCFF)\n"


def shown(terminal: int, end: str) -> str:
    """Return what a terminal shows next, up to `end`."""
    content = b""
    while not content.endswith(end.encode()):
        assert select.select([terminal], [], [], 60)[0], content  # seconds
        content += os.read(terminal, 1)
    return content.decode(errors="backslashreplace").replace("\r\n", "\n")


@contextmanager
def on_a_terminal(*words):
    """Run sample.py; give the process, and the descriptor of its screen and keyboard."""
    terminal, other_end = pytest.importorskip("pty").openpty()  # POSIX
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), other_end)
    with subprocess.Popen([sys.executable, "sample.py", *words], cwd=ROOT, **streams) as process:
        try:
            yield process, terminal
            process.wait(60)  # seconds
        finally:
            process.kill()


HINT = "the model continues what you type; an empty line lets it go on; Ctrl-D ends\n"


def test_conversation_on_a_terminal(uninterrupted):
    """Lines are edited, and replies are those to a pipe."""
    options = ["--interactive", "--max-new-tokens=30"]
    replies = run_sample(uninterrupted, *options, stdin=b"So it\nSo it\n")[0]
    with on_a_terminal(f"--ckpt={uninterrupted}", *options) as (process, terminal):
        assert shown(terminal, "> ") == f"{HINT}> "
        os.write(terminal, b"o it" + b"\x1b[D" * 4 + b"S\n")  # four times the arrow to the left
        first = shown(terminal, "\n> ")
        os.write(terminal, b"\x1b[A\n")  # the arrow up: the line before
        turns = [turn.partition("\n")[2] for turn in (first, shown(terminal, "\n> "))]
        os.write(terminal, b"\x04")  # Ctrl-D ends
    assert process.returncode == 0
    assert "".join(turn.removesuffix("> ") for turn in turns) == replies


def test_ctrl_d_during_a_reply(uninterrupted):
    """It ends the conversation when the reply ends."""
    options = ["--interactive", "--max-new-tokens=2000"]
    with on_a_terminal(f"--ckpt={uninterrupted}", *options) as (process, terminal):
        shown(terminal, "> ")
        os.write(terminal, b"So\n")
        shown(terminal, "So\r\n")
        os.read(terminal, 1)  # of the reply
        os.write(terminal, b"\x04")
        assert len(shown(terminal, "\n> ")) > 2000
    assert process.returncode == 0


def test_sample_ends_with_ctrl_c(uninterrupted):
    process = start("sample.py", f"--ckpt={uninterrupted}", "--max-new-tokens=1000000000")
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate()[0] and process.returncode == 130
