"""Conversations: from a pipe, and on a terminal in a process of its own."""

import os
import re
import select
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.runs import run_sample

HINT = "the model continues what you type; an empty line lets it go on; Ctrl-D ends\n"


def test_conversation_is_one_text(uninterrupted):
    """A reply ends with a stop string, which the next line continues, or at the length."""
    options = [uninterrupted, "--max-new-tokens=20"]
    text, screen, lines = "So", "So\n", ["it is\xe9", "", " of", "so"]
    for line in lines:  # each reply is that to all that is on the screen
        known = line.removesuffix("\xe9")
        text += f"\n{known}" if known and text[-1] not in "t\n" else known
        sample, _ = run_sample(*options, f"--prompt={text}")
        reply = re.match("[^t]{,20}t?", sample[len(text) :])[0]
        text, screen = text + reply, screen + reply.removesuffix("\n") + "\n"
    typed = "\n".join(lines).encode("utf-8-sig")  # PowerShell begins with a mark
    talk = run_sample(*options, "--prompt=So", "--stop=t", "--interactive", stdin=typed)
    assert talk == (screen, "left out, never read: '\xe9' (U+00E9)\n")


def shown(terminal: int, end: str) -> str:
    """Return what a terminal shows next, up to `end`."""
    content = b""
    while not content.endswith(end.encode()):
        assert select.select([terminal], [], [], 60)[0], content  # seconds
        content += os.read(terminal, 1)
    return content.decode(errors="backslashreplace").replace("\r\n", "\n")


def test_conversation_on_a_terminal(uninterrupted):
    """A line is edited; Ctrl-D during a reply ends the conversation when the reply ends."""
    terminal, other_end = pytest.importorskip("pty").openpty()  # POSIX
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), other_end)
    options = ["--interactive", "--max-new-tokens=500"]
    reply, _ = run_sample(uninterrupted, *options, stdin=b"So it\n")
    words = [sys.executable, "sample.py", f"--ckpt={uninterrupted}", *options]
    process = subprocess.Popen(words, cwd=ROOT, **streams)
    try:
        assert shown(terminal, "> ") == f"{HINT}> "
        os.write(terminal, b"o it" + b"\x1b[D" * 4 + b"S\n")  # four times the arrow to the left
        shown(terminal, "S\r\n")
        os.write(terminal, b"\x04")  # Ctrl-D
        assert shown(terminal, "\n> ") == f"{reply}> "
        assert process.wait(60) == 0  # seconds
    finally:
        process.kill()
