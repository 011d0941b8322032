"""Campaign: untrusted characters on a terminal. A terminal never gets a control character, wherever
it came from; a pipe gets every text byte for byte.

Both commands run on a pseudo-terminal, with every control character of C0 and C1, the bidirectional
ones, and many awkward strings, in every place from which a command might print them. The model of
the checkpoint predicts for each character the next one of its vocabulary, which contains control
characters.
"""

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import tty
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from checkpointing import checkpoint as checkpoints
from common.console import escape
from common.files import write_atomic
from configs.schema import Config, ModelConfig
from model.gpt import GPT
from tests.campaigns.fuzzing import AWKWARD, CONTROLS, Result, Tally, main, rng_of
from tests.commands import exit_code, sample_main, train_main
from tests.conftest import ROOT
from tests.variants import concatenated

NEW = 3  # characters to generate
VOCABULARY = "".join(sorted({*CONTROLS, *"abc é天"}))
SEQUENCES = [
    "\x1b[2J", "\x1b]0;title\x07", "\x1b[6n", "\x1bP+q\x1b\\", "\x9b31m", "\x1b[?1049h", "\x1bc",
    "\x0e", "\r\n", "b\b", "a\u0301\u0327", "👨‍👩‍👧", "مرحبا", "\u202eabc\u202c", "\udcff",
    "\U000e0041", "\uffff",
]  # fmt: skip


def awkward_string(number: int) -> str:
    """Return string number `number`: some pieces that may disturb a terminal."""
    rng = rng_of("string", number)
    pieces = [*CONTROLS, *SEQUENCES, *AWKWARD, *"abc é天"]
    return "".join(rng.choice(pieces) for _ in range(rng.choice([1, 2, 5, 20])))[:200]


def make_checkpoint(path: Path) -> None:
    """Write a checkpoint that predicts for each character the next one, cyclically."""
    config = ModelConfig(
        n_layer=1,
        n_head=1,
        positions="rope",
        norm="rmsnorm",
        mlp="relu2",
        tied=False,
        residual_init="zero",
    )
    model = GPT(config, len(VOCABULARY))  # its block is the identity at initialization
    with torch.no_grad():
        model.token_embedding.weight.copy_(torch.eye(len(VOCABULARY), config.n_embd))
        model.lm_head.weight.copy_(torch.eye(len(VOCABULARY), config.n_embd).roll(1, dims=0))
    saved = checkpoints.Checkpoint(
        config=Config(model=config),
        vocabulary=VOCABULARY,
        data=checkpoints.TextInfo(name="\x1b[2J", sha256="0" * 64, characters=1),
        tensors={
            f"model.{name}": each for name, each in concatenated(model.named_slices()).items()
        },
    )
    write_atomic(path, checkpoints.to_bytes(saved))


class Cases:
    """The places for a string: each method returns a script and its arguments that contain it."""

    def __init__(self, folder: Path):
        self.folder, self.checkpoint, self.files = folder, folder / "model.safetensors", 0
        make_checkpoint(self.checkpoint)

    def config(self, tree: dict) -> list[str]:
        self.files += 1
        file = self.folder / f"{self.files}.yaml"
        file.write_bytes(yaml.safe_dump(tree, width=10**6).encode(errors="surrogatepass"))
        return ["train.py", str(file), "--print-config"]

    def config_key(self, string: str) -> list[str]:
        return self.config({string: 1})

    def config_value(self, string: str) -> list[str]:
        return self.config({"model": {"attention": string}})

    def config_text(self, string: str) -> list[str]:
        return self.config({"out_dir": string})

    def config_file(self, string: str) -> list[str]:
        return ["train.py", string]

    def option(self, string: str) -> list[str]:
        return ["train.py", "configs/smoke.yaml", f"--{string}"]

    def argument(self, string: str) -> list[str]:
        return ["sample.py", "--ckpt=x", f" {string}"]

    def source(self, string: str) -> list[str]:
        return [
            "train.py",
            "configs/smoke.yaml",
            f"--data.sources=none{string}",
            f"--out_dir={self.folder / 'out'}",
        ]

    def text_file(self, string: str) -> list[str]:
        """Put the string into the name of an empty text file, as far as possible."""
        self.files += 1
        texts = self.folder / f"{self.files}.texts"
        texts.mkdir()
        (texts / (re.sub("[/\0\ud800-\udfff]", "_", string)[:60] + ".txt")).touch()
        return [
            "train.py",
            "configs/smoke.yaml",
            f"--data.sources={texts}",
            f"--out_dir={self.folder / 'out'}",
        ]

    def run_folder(self, string: str) -> list[str]:
        return ["train.py", "configs/smoke.yaml", f"--out_dir=/dev/null/{string}"]

    def checkpoint_file(self, string: str) -> list[str]:
        return ["sample.py", f"--ckpt=none{string}"]

    def prompt(self, string: str) -> list[str]:
        return [
            "sample.py",
            f"--ckpt={self.checkpoint}",
            f"--prompt= {string}",
            "--max-new-tokens=0",
        ]

    def generated(self, string: str) -> list[str]:
        """Generate after the characters of the string that are in the vocabulary, except NUL."""
        prompt = "".join(c for c in string if c in VOCABULARY[1:]) or VOCABULARY[-1]
        options = ["--temperature=0", f"--max-new-tokens={NEW}"]
        return ["sample.py", f"--ckpt={self.checkpoint}", f"--prompt={prompt}", *options]


PLACES: list[Callable[[Cases, str], list[str]]] = [
    Cases.config_key,
    Cases.config_value,
    Cases.config_text,
    Cases.config_file,
    Cases.option,
    Cases.argument,
    Cases.source,
    Cases.text_file,
    Cases.run_folder,
    Cases.checkpoint_file,
    Cases.prompt,
    Cases.generated,
]


def run_commands(file: str) -> None:
    """Run each command of a JSON file in this process."""
    for number, (script, *argv) in enumerate(json.loads(Path(file).read_text())):
        print(f"<case {number}>", flush=True)
        code = exit_code(train_main if script == "train.py" else sample_main, argv)
        sys.stderr.flush()
        print(f"<exit code {code}>", flush=True)


def outputs_of(
    folder: Path, commands: list[list[str]], terminal: bool, errors: bool
) -> list[tuple[int, str]]:
    """Run commands in a subprocess on a terminal or a pipe; return each exit code and output.

    With `errors`, the output includes stderr.
    """
    file = folder / "commands.json"
    file.write_text(json.dumps(commands))
    argv = [
        sys.executable,
        "-c",
        f"from tests.campaigns.terminal import run_commands; run_commands({str(file)!r})",
    ]
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        tty.setraw(writer)  # no carriage return is added before newlines
    stderr = writer if errors else subprocess.DEVNULL
    with subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=writer, stderr=stderr
    ) as process:
        os.close(writer)
        content = b"".join(iter(lambda: _read(reader), b""))
    assert process.returncode == 0, content[-2000:].decode(errors="replace")
    found = re.findall(r"<case \d+>\n(.*?)<exit code (\d+)>\n", content.decode(), re.DOTALL)
    assert len(found) == len(commands)
    return [(int(code), text) for text, code in found]


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # the end of a terminal's output
        os.close(handle)
        return b""


def run(cases: int) -> Tally:
    """Try every control character and `cases` awkward strings, each in every place."""
    tally = Tally("characters on a terminal", allowed={0, 2, 3, 4, 5})
    strings = [*CONTROLS, *map(awkward_string, range(cases))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = Cases(folder)
        tried = [(place.__name__, string) for place in PLACES for string in strings]
        commands = [place(places, string) for place in PLACES for string in strings]
        on_terminal = outputs_of(folder, commands, terminal=True, errors=True)
        on_pipe = outputs_of(folder, commands, terminal=False, errors=False)
        tally.add("as a text to train on", 0, VOCABULARY, train_on_controls(folder))
    for i, (place, string) in enumerate(tried):
        (code, text), (same_code, raw) = on_terminal[i], on_pipe[i]
        tally.add(
            f"as {place.replace('_', ' ')}",
            i,
            string,
            Result(code, "" if code else text, text if code else ""),
        )
        assert same_code == code
        if place == "prompt":
            assert code or raw == f" {string}\n", (string, raw)
        if place == "generated":
            assert raw == continuation(commands[i][2].removeprefix("--prompt=")) + "\n", raw
        if place in ("prompt", "generated") and not code:
            assert text == escape(raw, keep="\n\t"), (raw, text)
    return tally


def train_on_controls(folder: Path) -> Result:
    """Train briefly on a text of control characters; the output has its vocabulary and a sample."""
    text = folder / "controls.txt"
    text.write_text(VOCABULARY * 40, encoding="utf-8", newline="")
    options = [
        f"--data.sources={text}",
        f"--out_dir={folder / 'trained'}",
        "--max_iters=2",
        "--warmup_iters=0",
    ]
    [(code, on_terminal)] = outputs_of(
        folder, [["train.py", "configs/smoke.yaml", *options]], terminal=True, errors=False
    )
    assert escape(VOCABULARY[:100]) in on_terminal and "  | " in on_terminal
    return Result(code, on_terminal, "")


def continuation(prompt: str) -> str:
    """Return the prompt and the expected continuation."""
    position = VOCABULARY.index(prompt[-1]) + 1
    return prompt + "".join(VOCABULARY[(position + i) % len(VOCABULARY)] for i in range(NEW))


if __name__ == "__main__":
    main(run, cases=500)
