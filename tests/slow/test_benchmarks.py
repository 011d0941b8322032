"""Every benchmark runs, here in its shortest form; what it lacks is named in one line.

benchmarks/trials.py, which compares settings for users, has tests of its own.
"""

import importlib
import re

import pytest

from benchmarks import attention, lists, pictures, versus
from configs.schema import LAYOUTS
from tests.conftest import ROOT
from tests.runs import train

LOSS = r"\d\.\d{4}"
SHORTEST = {  # command, and what is printed; FOLDER has names.txt, and a checkout of nanoGPT
    "attention --sizes=toy --repeats=1": [
        rf"^\| {layout} \| sdpa \|( \d+\.\d\d \|){{3}}$" for layout in LAYOUTS
    ],
    "lists FOLDER/names.txt --seeds 1 2": [
        rf"^\| names, makemore's split \| {LOSS} \| {LOSS} to {LOSS} \| \d\.\d \| about 1.92",
        r"^\| sums of 2 digits, plain \| \d\.\d\d% ",
    ],
    "pictures": [
        rf"^plays: best {LOSS} \(train {LOSS}\) at step 2, last", r"^Too little text: best "
    ],
    "versus --nanogpt=FOLDER --repeats=2 --dtype=float32": [
        r"^\| nanoGPT \| \d\.\d \| 1.00 \| 1,000 \| 1.00 \| 1.8800 \|$",
        rf"^\| configs/fast.yaml \| \d+\.\d \| \d+\.\d\d \| [\d,]+ \| \d+\.\d\d \| {LOSS} \|$",
    ],
    "versus --nanogpt=FOLDER --repeats=1 --decode --block_size=8 --n_layer=1": [
        r"^\| nanogpt_gpu \| Hornbook \| [\d,]+ \| past \| [\d,]+ \| 1.00 \|$",
        r"^\| nanogpt_cpu \| Hugging Face \| [\d,]+ \| inside \| [\d,]+ \| \d+\.\d\d \|$",
    ],
}  # fmt: skip
NANOGPT_MODEL = """
import torch
from types import SimpleNamespace as GPTConfig

class GPT(torch.nn.Linear):
    def __init__(self, config):
        super().__init__(config.n_embd, config.vocab_size)
    def generate(self, ids, characters, temperature):
        assert ids.shape in ((1, 1), (1, 9)) and characters > 0
"""


def nanogpt_in(folder):
    """Write a folder that looks like a checkout of nanoGPT with its data."""
    (folder / versus.DATA).mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        (folder / versus.DATA / name).touch()
    # a step with 12 * 64 characters
    (folder / "train.py").write_text("print('iter 7: loss 4.1, time 768.00ms, mfu -1.00%')\n")
    (folder / versus.DATA / "input.txt").write_text("The text of this test.\n" * 100)
    (folder / "model.py").write_text(NANOGPT_MODEL)


@pytest.mark.parametrize("command", SHORTEST)
def test_benchmark_in_its_shortest_form(command, tmp_path, monkeypatch, capsys):
    """Every training takes two steps, in this process."""

    def train_two_steps(folder, config, *options):
        lengths = ["--max_iters=2", "--warmup_ratio=0", "--cooldown_ratio=0.5", "--log_interval=1"]
        small = ["--n_layer=1", "--n_embd=16", "--batch_size=2", "--eval_interval=1"]
        small.append("--kernel=auto")  # as in the recipes
        code, output = train(config, *options, *lengths, *small, f"--out_dir={folder}")
        assert code == 0, output

    for module in (lists, pictures, versus):
        monkeypatch.setattr(module, "train", train_two_steps)
    monkeypatch.setattr(versus, "nanogpt_loss", lambda *_: 1.88)
    monkeypatch.setattr(attention, "MIN_SECONDS", 1e-9)  # a single call
    monkeypatch.setattr(lists, "SUMS", {(100, False): "-"})
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    nanogpt_in(tmp_path)
    names = [f"{first}{second}" for first in "abcdefgh" * 20 for second in "aeiouxyz"]
    (tmp_path / "names.txt").write_text("\n".join(names))

    monkeypatch.chdir(ROOT)
    name, *words = command.replace("FOLDER", str(tmp_path)).split()
    importlib.import_module(f"benchmarks.{name}").main(words)
    printed = capsys.readouterr().out
    for part in SHORTEST[command]:
        assert re.search(part, printed, re.MULTILINE), f"{part}\n{printed}"


def test_missing_file_of_nanogpt_is_named(tmp_path):
    (tmp_path / "train.py").touch()
    message = rf"^error: {tmp_path}/\S+/train.bin is missing; git clone .* python \S+prepare.py$"
    with pytest.raises(SystemExit, match=message):
        versus.main([f"--nanogpt={tmp_path}"])
