"""Hornbook against nanoGPT: python -m benchmarks.versus --nanogpt FOLDER [--decode]

FOLDER is a checkout of nanoGPT in which data/shakespeare_char is prepared.

- Training: whole commands, by turns, on the same text. nanoGPT's recipe for a CPU, which makes
  2,000 steps; configs/fast.yaml, made to reach the loss of that recipe; configs/nanogpt_cpu.yaml,
  the same model, batch and steps as nanoGPT's. Compare the losses before the times: they are
  exact, over the whole validation text. Characters per second are medians over the training steps
  (ours: means of ten), without evaluations: compare them for equal models. Each repeat of ours has
  another seed; nanoGPT's is always 1337.
- Decoding (--decode): one text in float32, by turns, inside the context and past it, by models of
  nanoGPT's CPU and GPU recipes with initial weights, on which the speed does not depend. Hugging
  Face's `generate` cannot go past the context.

Prints tables in Markdown. Figures are medians over the repeats; a ratio is the median of the
ratios of each repeat, and above 1 if ours is faster. An option of train.py, such as
--dtype=float32, goes to all runs and models of ours. OMP_NUM_THREADS=1 measures with one thread.
"""

import argparse
import importlib.util
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.runs import read_curves, train
from configs.command import parse_train
from configs.schema import DataConfig, ModelConfig
from convert import read_nanogpt
from data.batches import evaluation_windows
from data.corpus import load_corpus
from model.generate import Generation, Sampler
from model.gpt import GPT
from storage.checkpoint import model_of
from training.device import select_runtime
from training.evaluate import exact_loss

RECIPES = ["configs/fast.yaml", "configs/nanogpt_cpu.yaml"]
DECODED = ["configs/nanogpt_cpu.yaml", "configs/nanogpt_gpu.yaml"]  # the sizes of nanoGPT
NANOGPT_COMMAND = [  # nanoGPT's README, "I only have a macbook"; it is faster without compiling
    "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False",
    "--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12", "--n_layer=4",
    "--n_head=4", "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0",
    "--always_save_checkpoint=True",
]  # fmt: skip
NANOGPT_TOKENS = 64 * 12  # of a step
TEXT = "data/shakespeare_char/input.txt"  # in nanoGPT's folder
VOCAB_SIZE, TEMPERATURE = 65, 0.8
DECODE_OPTIONS = ["--kernel=sdpa", "--dropout=0", "--attention_dropout=0"]

Measured = dict[str, list[tuple[float, ...]]]  # by program: the figures of each repeat


def ratio(measured: Measured, name: str, base: str, column: int) -> float:
    """Return the median ratio of a figure of one program to that of another, by repeats."""
    pairs = zip(measured[name], measured[base], strict=True)
    return statistics.median(a[column] / b[column] for a, b in pairs)


# ----------------------------------------------------------------------------------------- training


def train_ours(config: str, *options: str) -> tuple[float, float, float]:
    """Run our train.py; return its seconds, characters/s of a step, and loss."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name) / "run", time.perf_counter()
        train(folder, config, *options)
        seconds = time.perf_counter() - began
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        speeds = [event.value for event in events.Scalars("train/chars_per_sec")]
        return seconds, statistics.median(speeds), read_curves(folder)["val/loss"][-1]


def train_nanogpt(folder: Path) -> tuple[float, float, float]:
    """Run the train.py of a checkout of nanoGPT; return what `train_ours` returns."""
    with tempfile.TemporaryDirectory() as out_dir:
        # its code is of an older PyTorch, which warns
        command = [sys.executable, "-Wignore", *NANOGPT_COMMAND, f"--out_dir={out_dir}"]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - began
        loss = nanogpt_loss(Path(out_dir, "ckpt.pt"), folder / TEXT)
    milliseconds = [float(number) for number in re.findall(r"time ([\d.]+)ms", done.stdout)]
    return seconds, NANOGPT_TOKENS / (statistics.median(milliseconds) / 1000), loss


def nanogpt_loss(ckpt: Path, text: Path) -> float:
    """Return the exact loss of a checkpoint of nanoGPT on the last tenth of its text."""
    model = model_of(read_nanogpt(ckpt, text, "utf-8"))
    val = load_corpus(DataConfig(sources=[str(text)])).val
    windows = evaluation_windows(val, model.config.block_size, batch_size=64)
    return exact_loss(model, windows, select_runtime("cpu", "float32"))


def compare_training(options: argparse.Namespace, words: list[str]) -> None:
    """Train by turns; print each run as it ends, then the table."""
    words = [f"--sources={options.nanogpt / TEXT}", *words]
    programs = {"nanoGPT": lambda seed: train_nanogpt(options.nanogpt)}  # its seed is fixed
    programs |= {config: partial(train_ours, config, *words) for config in RECIPES}

    measured: Measured = {name: [] for name in programs}
    for seed in range(options.repeats):
        for name, program in programs.items():
            seconds, speed, loss = program(f"--seed={seed}")
            measured[name].append((seconds, speed, loss))
            print(f"{name}: {seconds:.1f} s, {speed:,.0f} chars/s, loss {loss:.4f}", flush=True)
    print("\n| program | seconds of the command | ratio | characters/s | ratio | mean loss |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, figures in measured.items():
        seconds, speed, loss = zip(*figures, strict=True)
        print(
            f"| {name} | {statistics.median(seconds):.1f} "
            f"| {ratio(measured, 'nanoGPT', name, 0):.2f} "
            f"| {statistics.median(speed):,.0f} | {ratio(measured, name, 'nanoGPT', 1):.2f} "
            f"| {statistics.mean(loss):.4f} |"
        )


# ----------------------------------------------------------------------------------------- decoding


def writers(config: ModelConfig, nanogpt: Path) -> dict[str, Callable[[int, int], object]]:
    """Build a model of each program in the sizes of a config; return functions that write a text.

    They take the length of a prompt and the number of characters to write.
    """
    from transformers import GPT2Config, GPT2LMHeadModel  # of requirements-dev.txt

    spec = importlib.util.spec_from_file_location("nanogpt", nanogpt / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    T, shape = config.block_size, {"vocab_size": VOCAB_SIZE}
    shape |= {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")}
    ours = GPT(config, VOCAB_SIZE).eval()
    theirs = module.GPT(module.GPTConfig(**shape, block_size=T, bias=False, dropout=0.0)).eval()
    hugging_face_config = GPT2Config(**shape, n_positions=T, bos_token_id=None, eos_token_id=None)
    hugging_face = GPT2LMHeadModel(hugging_face_config).eval()

    def write(prompt: int, characters: int) -> None:
        texts = Generation(ours, Sampler(temperature=TEMPERATURE))
        texts.append(np.zeros((1, prompt), np.int64))
        for _ in range(characters):
            texts.draw()

    def write_theirs(prompt: int, characters: int) -> None:
        theirs.generate(torch.zeros(1, prompt, dtype=int), characters, temperature=TEMPERATURE)

    def write_hugging_face(prompt: int, characters: int) -> None:
        ids = torch.zeros(1, prompt, dtype=int)
        hugging_face.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=characters, do_sample=True,
            temperature=TEMPERATURE, top_k=0, use_cache=True, pad_token_id=0,
        )  # fmt: skip

    return {"Hornbook": write, "nanoGPT": write_theirs, "Hugging Face": write_hugging_face}


def compare_decoding(options: argparse.Namespace, words: list[str]) -> None:
    """Let the programs write by turns; print a table."""
    print(f"{torch.get_num_threads()} thread(s), torch {torch.__version__}\n")
    print("| model | where | program | characters/s | ratio |")
    print("| --- | --- | --- | ---: | ---: |")
    for config in DECODED:
        sizes = parse_train([config, *DECODE_OPTIONS, *words]).config.model
        programs, T = writers(sizes, options.nanogpt), sizes.block_size
        # past the context: where ours has just moved its window, until it moves it again
        for where, prompt, characters in (("inside", 1, T - 1), ("past", T + 1, T // 2)):
            if where == "past":
                del programs["Hugging Face"]
            measured: Measured = {name: [] for name in programs}
            for _ in range(options.repeats):
                for name, program in programs.items():
                    began = time.perf_counter()
                    program(prompt, characters)
                    measured[name].append((characters / (time.perf_counter() - began),))
            for name, speeds in measured.items():
                speed, times = statistics.median(speeds)[0], ratio(measured, "Hornbook", name, 0)
                print(f"| {config} | {where} | {name} | {speed:,.0f} | {times:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, required=True, help="checkout of nanoGPT")
    parser.add_argument("--decode", action="store_true", help="measure decoding, not training")
    parser.add_argument("--repeats", type=int, default=3)
    options, words = parser.parse_known_args()
    (compare_decoding if options.decode else compare_training)(options, words)


if __name__ == "__main__":
    main()
