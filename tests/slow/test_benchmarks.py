"""Every benchmark runs, here in its shortest form; trials.py, which is for users, has own tests."""

import importlib
import re

import pytest

from benchmarks import lists, pictures, versus
from tests.conftest import ROOT
from tests.runs import train
from tests.slow.test_convert import TEXT, save

TWO_STEPS = [
    "--max_iters=2", "--warmup_ratio=0", "--cooldown_ratio=0.5", "--eval_interval=1",
    "--log_interval=1", "--n_layer=1", "--n_embd=16", "--batch_size=2", "--kernel=auto",
]  # fmt: skip
SHORTEST = {  # command, and a line that it prints; NANOGPT is a checkout
    "attention --sizes small --seconds=1e-9": r" +heads, sdpa +\|.*",
    "lists data/lists/names.txt --seeds 1 2": r"\| sums of 2 digits, plain \| \d\.\d\d% .*",
    "pictures": r"Too little text: best \d\.\d{4} .*",
    "versus --nanogpt=NANOGPT --repeats=2": r"\| configs/nanogpt_cpu.yaml (\| [\d,.]+ ){5}\|",
    "versus --nanogpt=NANOGPT --repeats=1 --decode --block_size=8 --n_layer=1": (
        r"\| configs/nanogpt_gpu.yaml \| past \| nanoGPT \| [\d,]+ \| \d+\.\d\d \|"
    ),
}
NANOGPT_TRAIN = """
import shutil, sys
shutil.copy("ckpt.pt", sys.argv[-1].removeprefix("--out_dir="))
print("iter 7: loss 4.1, time 768.00ms, mfu -1.00%")
"""
NANOGPT_MODEL = """
import torch

GPTConfig = dict

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
    def generate(self, ids, characters, temperature):
        pass
"""


@pytest.mark.parametrize("command", SHORTEST)
def test_benchmark_in_its_shortest_form(command, tmp_path, monkeypatch, capsys):
    """Every training takes two steps, in this process."""

    def train_two_steps(folder, *arguments):
        code, output = train(*arguments, *TWO_STEPS, f"--out_dir={folder}")
        assert code == 0, output

    for module in (lists, pictures, versus):
        monkeypatch.setattr(module, "train", train_two_steps)
    monkeypatch.setattr(lists, "SUMS", {"sums of 2 digits, plain": (100, False)})
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    (tmp_path / "train.py").write_text(NANOGPT_TRAIN)
    (tmp_path / "model.py").write_text(NANOGPT_MODEL)
    (tmp_path / versus.TEXT).parent.mkdir(parents=True)
    (tmp_path / versus.TEXT).write_text(TEXT * 10, encoding="utf-8")
    save(tmp_path / "ckpt.pt")

    monkeypatch.chdir(ROOT)
    name, *words = command.replace("NANOGPT", str(tmp_path)).split()
    monkeypatch.setattr("sys.argv", [name, *words])
    importlib.import_module(f"benchmarks.{name}").main()
    assert re.search(f"^{SHORTEST[command]}$", capsys.readouterr().out, re.MULTILINE)
