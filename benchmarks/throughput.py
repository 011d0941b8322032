"""Training speed of one process: python -m benchmarks.throughput [--nanogpt FOLDER] [--steps N]

Whole optimization steps (forward, backward, clipping, update) on one fixed batch, so without
loading batches, in nanoGPT's architecture and with its dropout. With FOLDER, a checkout of nanoGPT,
steps of both programs alternate.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.nanogpt import SHAPES, VOCAB_SIZE, build_nanogpt, shape
from benchmarks.timing import median_ratio, time_interleaved
from configs.schema import ModelConfig, TrainConfig
from model.gpt import GPT
from training.device import keep_freed_memory, select_runtime
from training.evaluate import cross_entropy
from training.optimizers import build_optimizers

WARMUP = 3  # steps
BATCH_SIZES = {"small": 12, "baby": 16}  # nanoGPT trains the latter with 64, on a GPU


def training_step(config: ModelConfig, batch_size: int) -> Callable[[], float]:
    """Return a call that makes one step like training/step.py and returns the loss."""
    runtime, model = select_runtime("cpu", "auto"), GPT(config, VOCAB_SIZE)
    train = TrainConfig(optimizer="adamw", learning_rate=1e-3)
    optimizers = build_optimizers(model, train, runtime.dtype)
    x, y = torch.randint(VOCAB_SIZE, (2, batch_size, config.block_size))

    def step() -> float:
        with runtime.autocast():
            logits = model(x)  # (B, T, V)
        loss = cross_entropy(logits, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        return loss.item()

    return step


def nanogpt_training_step(
    folder: Path, config: ModelConfig, batch_size: int, compiled: bool
) -> Callable[[], float]:
    """Return a call that makes one step as nanoGPT's train.py does on a CPU, and returns the loss.

    Hyperparameters as in nanoGPT's config/train_shakespeare_char.py.
    """
    model = build_nanogpt(folder, config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    forward = torch.compile(model) if compiled else model
    x, y = torch.randint(VOCAB_SIZE, (2, batch_size, config.block_size))

    def step() -> float:
        _, loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def time_steps(steps: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each step in each repeat after the warm-up; steps alternate."""
    setups = {name: lambda step=step: step for name, step in steps.items()}
    seconds = time_interleaved(setups, WARMUP + repeats)
    return {name: taken[WARMUP:] for name, taken in seconds.items()}


def compare_with_nanogpt(names: list[str], folder: Path | None, repeats: int) -> None:
    """Print the training speed of ours and nanoGPT in its shapes of these names."""
    for name in names:
        config, batch_size = shape(name, "--kernel=auto"), BATCH_SIZES[name]
        steps = {"ours": training_step(config, batch_size)}
        if folder:
            for compiled in (False, True):
                step = nanogpt_training_step(folder, config, batch_size, compiled)
                steps[f"nanoGPT, compile {compiled}"] = step
        seconds = time_steps(steps, repeats)
        for label, taken in seconds.items():
            speed = batch_size * config.block_size / statistics.median(taken)
            line = f"{name:<6} {label:<24}{speed:>9,.0f} characters/s"
            if label != "ours":
                ratio = median_ratio(taken, seconds["ours"])
                line += f"  ours is {ratio:.2f} times as fast"
            print(line)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args(argv)
    keep_freed_memory()
    print(
        f"{torch.get_num_threads()} thread(s), {select_runtime('cpu', 'auto')}, "
        f"torch {torch.__version__}"
    )
    compare_with_nanogpt(options.shapes, options.nanogpt, options.steps)


if __name__ == "__main__":
    main()
