"""Training time and loss against nanoGPT: python -m benchmarks.time_to_loss --nanogpt FOLDER

Whole training commands, alternating, on the same text:

- nanoGPT's recipe for a CPU, by the train.py in FOLDER, a checkout of nanoGPT with
  data/shakespeare_char prepared
- configs/fast.yaml, made to reach the loss of that recipe
- configs/shakespeare.yaml, smaller and with fewer steps: on a CPU with bfloat16, in less time than
  that recipe takes

Each recipe trains for a fixed number of steps: compare the losses before the times. Losses are
exact, over the whole validation text; "training" is the time of the training steps alone. Each
repeat of ours has another seed; nanoGPT's is always 1337.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.nanogpt import load_nanogpt_module, nanogpt_file
from benchmarks.runs import read_loss_curve, seconds_in_steps, train
from benchmarks.timing import ratios
from data.batches import Split, evaluation_windows
from training.device import select_runtime
from training.evaluate import exact_loss

NANOGPT_OPTIONS = {  # nanoGPT's README, "I only have a macbook"
    "device": "cpu",
    "eval_iters": 20,
    "log_interval": 1,
    "block_size": 64,
    "batch_size": 12,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "dropout": 0.0,
    "compile": False,  # which is faster at this size
}
NANOGPT_STEPS = 2000
FAST = ["configs/fast.yaml"]
SHORTENED = [
    "configs/shakespeare.yaml",
    "--block_size=128",
    "--batch_size=16",
    "--n_layer=2",
    "--n_embd=192",
    "--max_iters=1000",
    "--cooldown_ratio=0.9",
    "--eval_interval=1000",
]


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training command.

    command_seconds  from start to exit of the process
    step_seconds     in training steps alone
    loss             exact validation loss at the end, nats per character
    """

    command_seconds: float
    step_seconds: float
    loss: float


def run_training(config: str, *options: str) -> TrainingResult:
    """Run our train.py with a config and options."""
    with tempfile.TemporaryDirectory() as folder:
        out_dir = Path(folder) / "run"
        began = time.perf_counter()
        train(out_dir, config, *options)
        seconds = time.perf_counter() - began
        loss = float(read_loss_curve(out_dir).val_loss[-1])
        return TrainingResult(seconds, seconds_in_steps(out_dir), loss)


def run_nanogpt_training(folder: Path, max_iters: int = NANOGPT_STEPS) -> TrainingResult:
    """Run the train.py of a nanoGPT checkout, and measure the loss of its last checkpoint.

    Its time per step includes the evaluations, so `step_seconds` is the median step times the
    number of steps.
    """
    with tempfile.TemporaryDirectory() as out_dir:
        settings = NANOGPT_OPTIONS | {
            "max_iters": max_iters,
            "lr_decay_iters": max_iters,
            "out_dir": out_dir,
            "always_save_checkpoint": True,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *options]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        saved = torch.load(f"{out_dir}/ckpt.pt", weights_only=True)
    milliseconds = list(map(float, re.findall(r"time ([\d.]+)ms", done.stdout)))
    step_seconds = statistics.median(milliseconds) / 1000 * max_iters
    return TrainingResult(seconds, step_seconds, nanogpt_loss(folder, saved))


def nanogpt_text(folder: Path) -> str:
    """Return the option for the text in a nanoGPT checkout; exit if it is not prepared."""
    nanogpt_file(folder, "train.py")
    for name in ("train.bin", "val.bin", "input.txt"):
        path = nanogpt_file(folder, f"data/shakespeare_char/{name}")
    return f"--sources={path.resolve()}"


def nanogpt_loss(folder: Path, saved: dict) -> float:
    """Return the exact validation loss of a nanoGPT checkpoint, in nats per character."""
    module = load_nanogpt_module(folder)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    weights = {
        name.removeprefix("_orig_mod."): value  # the prefix is torch.compile's
        for name, value in saved["model"].items()
    }
    model.load_state_dict(weights)
    ids = np.fromfile(folder / "data/shakespeare_char/val.bin", np.uint16)
    windows = evaluation_windows(Split(ids, ((0, len(ids)),)), model.config.block_size, 64)
    return exact_loss(NanoGPTLogits(model), windows, select_runtime("cpu", "float32"))


class NanoGPTLogits(torch.nn.Module):
    """A nanoGPT model called as ours is: ids (B, T) in, logits (B, T, V) out.

    nanoGPT returns the logits of all positions only when it gets targets.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, ids)[0]


def print_comparison(results: dict[str, list[TrainingResult]]) -> None:
    """Print the speed of each recipe relative to the first one, and all mean losses."""
    (_, baseline), *others = results.items()
    for name, runs in others:
        for label, attribute in (("command", "command_seconds"), ("training", "step_seconds")):
            slow, fast = ([getattr(run, attribute) for run in each] for each in (baseline, runs))
            speedups = ratios(slow, fast)
            print(
                f"{name}, {label}: {statistics.median(speedups):.1f} times as fast "
                f"({min(speedups):.1f} to {max(speedups):.1f})"
            )
    losses = [
        f"{name} {statistics.mean(run.loss for run in runs):.4f}" for name, runs in results.items()
    ]
    print(f"mean losses: {', '.join(losses)}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    checkout = "folder of a checkout of nanoGPT"
    parser.add_argument("--nanogpt", type=Path, required=True, help=checkout)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    text = nanogpt_text(options.nanogpt)
    recipes = {
        "nanoGPT": lambda seed: run_nanogpt_training(options.nanogpt),
        "fast.yaml": lambda seed: run_training(*FAST, text, seed),
        "shakespeare.yaml, shortened": lambda seed: run_training(*SHORTENED, text, seed),
    }
    results = {name: [] for name in recipes}
    for seed in range(options.repeats):
        for name, run_recipe in recipes.items():
            result = run_recipe(f"--seed={seed}")
            results[name].append(result)
            print(
                f"{name:<28} command {result.command_seconds:6.1f} s  "
                f"training {result.step_seconds:6.1f} s  loss {result.loss:.4f}",
                flush=True,
            )
    print_comparison(results)


if __name__ == "__main__":
    main()
