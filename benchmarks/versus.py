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
from configs.schema import ModelConfig
from model.generate import Generation, Sampler
from model.gpt import GPT

RECIPES = ["configs/fast.yaml", "configs/nanogpt_cpu.yaml"]
GPT2_RECIPES = ["configs/nanogpt_cpu.yaml", "configs/nanogpt_gpu.yaml"]  # models of nanoGPT
NANOGPT_BATCH, NANOGPT_CONTEXT = 12, 64
NANOGPT_OPTIONS = [  # nanoGPT's README, "I only have a macbook"
    "--device=cpu", "--eval_iters=20", "--log_interval=1", "--n_layer=4", "--n_head=4",
    "--n_embd=128", "--dropout=0.0", "--compile=False",  # which is faster at this size
    f"--block_size={NANOGPT_CONTEXT}", f"--batch_size={NANOGPT_BATCH}",
]  # fmt: skip
NANOGPT_STEPS, NANOGPT_INTERVAL, WARMUP_RATIO = 2000, 250, 0.05
DATA = "data/shakespeare_char"
VOCAB_SIZE, TEMPERATURE = 65, 0.8
DECODE_OPTIONS = ["--kernel=sdpa", "--dropout=0", "--attention_dropout=0"]
VAL_FRACTION = 0.1  # the last tenth of the text, in both programs

Measured = dict[str, list[tuple[float, ...]]]  # by program: the figures of each repeat


def nanogpt_file(folder: Path, name: str) -> Path:
    """Return the path of a file in a checkout of nanoGPT; exit if it is missing."""
    path = folder / name
    if not path.exists():
        what_to_do = f"git clone https://github.com/karpathy/nanoGPT {folder}, then"
        what_to_do += f" python {folder}/{DATA}/prepare.py"
        raise SystemExit(f"error: {path} is missing; {what_to_do}")
    return path.resolve()


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


def train_nanogpt(folder: Path, text: Path, steps: int) -> tuple[float, float, float]:
    """Run the train.py of a checkout of nanoGPT; return what `train_ours` returns."""
    # nanoGPT saves only at an evaluation: let there be one at the last step
    interval = NANOGPT_INTERVAL if steps % NANOGPT_INTERVAL == 0 else steps
    with tempfile.TemporaryDirectory() as out_dir:
        options = [f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--out_dir={out_dir}"]
        options += [f"--eval_interval={interval}", "--always_save_checkpoint=True"]
        options.append(f"--warmup_iters={round(WARMUP_RATIO * steps)}")
        words = ["train.py", "config/train_shakespeare_char.py", *NANOGPT_OPTIONS, *options]
        began = time.perf_counter()
        printed = output_of(*words, folder=folder)
        seconds = time.perf_counter() - began
        loss = nanogpt_loss(Path(out_dir), text)
    milliseconds = [float(number) for number in re.findall(r"time ([\d.]+)ms", printed)]
    characters = NANOGPT_BATCH * NANOGPT_CONTEXT
    return seconds, characters / (statistics.median(milliseconds) / 1000), loss


def nanogpt_loss(out_dir: Path, text: Path) -> float:
    """Return the exact validation loss of the checkpoint that nanoGPT has left in `out_dir`.

    It is imported by convert.py, and scored in float32 by sample.py, which reads windows of the
    model's context, as an evaluation does.
    """
    content = text.read_text()
    val = out_dir / "val.txt"
    val.write_text(content[int(len(content) * (1 - VAL_FRACTION)) :])
    run = out_dir / "imported"
    output_of("convert.py", out_dir / "ckpt.pt", f"--vocabulary={text}", f"--out_dir={run}")
    printed = output_of("sample.py", f"--ckpt={run}", f"--score={val}", "--dtype=float32")
    return float(printed.split()[0])  # 1.9012 nats, ...


def output_of(*words: object, folder: Path | None = None) -> str:
    """Run a Python script in a folder, or in this one; return what it prints."""
    command = [sys.executable, "-Wignore", *map(str, words)]  # nanoGPT is of older PyTorch
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def compare_training(options: argparse.Namespace, words: list[str]) -> None:
    """Train by turns; print each run as it ends, then the table."""
    for name in ("train.py", f"{DATA}/train.bin", f"{DATA}/val.bin", f"{DATA}/input.txt"):
        text = nanogpt_file(options.nanogpt, name)
    steps = [f"--max_iters={options.steps}"] if options.steps else []
    programs: dict[str, Callable] = {
        "nanoGPT": lambda _: train_nanogpt(options.nanogpt, text, options.steps or NANOGPT_STEPS)
    }
    for config in options.configs or RECIPES:
        programs[config] = partial(train_ours, config, f"--sources={text}", *steps, *words)

    measured: Measured = {name: [] for name in programs}
    for seed in range(options.repeats):
        for name, program in programs.items():
            seconds, speed, loss = program(f"--seed={seed}")
            measured[name].append((seconds, speed, loss))
            done = f"{name}: {seconds:.1f} s, {speed:,.0f} characters/s, loss {loss:.4f}"
            print(done, flush=True)
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


def decoders(config: ModelConfig, nanogpt: Path) -> dict[str, tuple[torch.nn.Module, Callable]]:
    """Build a model of each program in the sizes of a config, and a function that writes a text.

    The function takes the length of a prompt and the number of characters to write.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ModuleNotFoundError as error:
        raise SystemExit(f"error: {error}; pip install -r requirements-dev.txt") from None
    spec = importlib.util.spec_from_file_location("nanogpt", nanogpt_file(nanogpt, "model.py"))
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

    return {
        "Hornbook": (ours, write),
        "nanoGPT": (theirs, write_theirs),
        "Hugging Face": (hugging_face, write_hugging_face),
    }


def compare_decoding(options: argparse.Namespace, words: list[str]) -> None:
    """Let the programs write by turns; print a table for each model."""
    print(f"{torch.get_num_threads()} thread(s), torch {torch.__version__}")
    for config in options.configs or GPT2_RECIPES:
        sizes = parse_train([config, *DECODE_OPTIONS, *words]).config.model
        programs, T = decoders(sizes, options.nanogpt), sizes.block_size
        print("\n| model | program | parameters | where | characters/s | ratio |")
        print("| --- | --- | ---: | --- | ---: | ---: |")
        # past the context: where ours has just moved its window, until it moves it again
        for where, prompt, characters in (("inside", 1, T - 1), ("past", T + 1, T // 2)):
            if where == "past":
                del programs["Hugging Face"]
            measured: Measured = {name: [] for name in programs}
            for _ in range(options.repeats):
                for name, (_, writer) in programs.items():
                    began = time.perf_counter()
                    writer(prompt, characters)
                    measured[name].append((characters / (time.perf_counter() - began),))
            for name, speeds in measured.items():
                count = sum(parameter.numel() for parameter in programs[name][0].parameters())
                print(
                    f"| {Path(config).stem} | {name} | {count:,} | {where} "
                    f"| {statistics.median(speeds)[0]:,.0f} "
                    f"| {ratio(measured, 'Hornbook', name, 0):.2f} |",
                    flush=True,
                )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, required=True, help="checkout of nanoGPT")
    parser.add_argument("--decode", action="store_true", help="measure decoding, not training")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--configs", nargs="+", help="our recipes, or GPT-2's sizes to decode with")
    parser.add_argument("--steps", type=int, help="of all trainings, for a short first try")
    options, words = parser.parse_known_args(argv)
    (compare_decoding if options.decode else compare_training)(options, words)


if __name__ == "__main__":
    main()
