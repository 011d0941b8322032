"""Every benchmark runs, here in its shortest form; trials.py, which is for users, has own tests."""

import importlib
import math
import re

import pytest

from benchmarks import lists, pictures, versus
from configs.schema import LAYOUTS
from tests.conftest import ROOT
from tests.runs import train
from tests.slow.test_convert import model_args, random_gpt2, save, weights_of

TEXT = "The text of this test.\n" * 100
LOSS = r"\d\.\d{4}"
SHORTEST = {  # command, and what is printed; FOLDER has names.txt, and a checkout of nanoGPT
    "attention --sizes small --seconds=1e-9": [rf"^ +{layout}, sdpa +\|" for layout in LAYOUTS],
    "lists FOLDER/names.txt --seeds 1 2": [
        rf"^\| names, makemore's split .* \| {LOSS} \| {LOSS} to {LOSS} \| \d\.\d \|$",
        r"^\| sums of 2 digits, plain \| \d\.\d\d% ",
    ],
    "pictures": [
        rf"^plays: best {LOSS} \(train {LOSS}\) at step 2, last", r"^Too little text: best "
    ],
    "versus --nanogpt=FOLDER --repeats=2 --dtype=float32": [
        rf"^\| nanoGPT \| \d\.\d \| 1.00 \| 1,000 \| 1.00 \| {math.log(len(set(TEXT))):.4f} \|$",
        rf"^\| configs/fast.yaml \| \d+\.\d \| \d+\.\d\d \| [\d,]+ \| \d+\.\d\d \| {LOSS} \|$",
    ],
    "versus --nanogpt=FOLDER --repeats=1 --decode --block_size=8 --n_layer=1": [
        r"^\| configs/nanogpt_gpu.yaml \| past \| Hornbook \| [\d,]+ \| 1.00 \|$",
        r"^\| configs/nanogpt_cpu.yaml \| past \| nanoGPT \| \d \| [1-9]\d*\.\d\d \|$",
        r"^\| configs/nanogpt_cpu.yaml \| inside \| Hugging Face \| [\d,]+ \| \d+\.\d\d \|$",
    ],
}  # fmt: skip
NANOGPT_TRAIN = """
import shutil, sys
shutil.copy("ckpt.pt", sys.argv[-1].removeprefix("--out_dir="))
print("iter 7: loss 4.1, time 768.00ms, mfu -1.00%")  # a step with 12 * 64 characters
"""
NANOGPT_MODEL = """
import time, torch
from types import SimpleNamespace as GPTConfig

class GPT(torch.nn.Linear):
    def __init__(self, config):
        super().__init__(config.n_embd, config.vocab_size)
    def generate(self, ids, characters, temperature):
        assert ids.shape in ((1, 1), (1, 9)) and characters > 0
        time.sleep(1)
"""


def nanogpt_in(folder):
    """Write a folder that looks like a checkout of nanoGPT; its model predicts ln V."""
    (folder / "train.py").write_text(NANOGPT_TRAIN)
    (folder / "model.py").write_text(NANOGPT_MODEL)
    (folder / versus.TEXT).parent.mkdir(parents=True)
    (folder / versus.TEXT).write_text(TEXT)
    args = model_args(vocab_size=len(set(TEXT)))
    weights = weights_of(random_gpt2(args), args)
    save(folder / "ckpt.pt", args, {name: 0 * tensor for name, tensor in weights.items()})


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
    monkeypatch.setattr(lists, "SUMS", {"sums of 2 digits, plain": (100, False)})
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    nanogpt_in(tmp_path)
    names = [f"{first}{second}" for first in "abcdefgh" * 20 for second in "aeiouxyz"]
    (tmp_path / "names.txt").write_text("\n".join(names))

    monkeypatch.chdir(ROOT)
    name, *words = command.replace("FOLDER", str(tmp_path)).split()
    monkeypatch.setattr("sys.argv", [name, *words])
    importlib.import_module(f"benchmarks.{name}").main()
    printed = capsys.readouterr().out
    for part in SHORTEST[command]:
        assert re.search(part, printed, re.MULTILINE), f"{part}\n{printed}"
