"""Training speed of one process: python -m benchmarks.throughput [--nanogpt FOLDER] [--steps N]

Whole optimization steps (forward, backward, clipping, update) on one fixed batch, so without
loading batches. Three measurements:

- Speed in nanoGPT's architecture, batch size and dropout and, with FOLDER, a checkout of nanoGPT,
  against it; steps alternate.
- Utilization of modern models: model FLOP/s as a fraction of the FLOP/s of large matrix products.
- Cost of a character in a long context against a short one.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.decode import VOCAB_SIZE, build_nanogpt
from benchmarks.timing import median_ratio, time_interleaved
from configs.schema import ModelConfig, TrainConfig
from model.gpt import GPT
from model.parameters import parameter_count
from training import device
from training.device import keep_freed_memory
from training.evaluate import cross_entropy
from training.optimizers import build

WARMUP = 3  # steps
PEAK_SIZE = 2048  # rows and columns of the matrices whose product measures the peak
MODERN = {
    "kernel": "batched",
    "positions": "rope",
    "mlp": "relu2",
    "qk_norm": True,
    "residual_init": "zero",
    "tied": False,
    "logit_softcap": 15.0,
}
SMALL = ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, kernel="batched")
BABY = ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2, kernel="batched")
# nanoGPT's two recipes: name, config, batch size; baby trains with 64 there, on a GPU
NANOGPT_SHAPES = {"small": (SMALL, 12), "baby": (BABY, 16)}
MODERN_SHAPES = {  # likewise
    "4 x 256, context 128": (
        ModelConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, **MODERN),
        24,
    ),
    "6 x 384, context 256": (
        ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, **MODERN),
        12,
    ),
}
SHORT, LONG = 64, 1024  # context lengths
CHARACTERS_PER_STEP = 4096  # in either context


def training_step(
    config: ModelConfig, batch_size: int, optimizer: str = "adamw"
) -> Callable[[], float]:
    """Return a call that makes one step like training/step.py and returns the loss."""
    selected, model = device.select_runtime("cpu", "auto"), GPT(config, VOCAB_SIZE)
    optimizers = build(model, TrainConfig(optimizer=optimizer), selected.dtype)
    x, y = torch.randint(VOCAB_SIZE, (2, batch_size, config.block_size))

    def step() -> float:
        with selected.autocast():
            logits = model(x)  # (B, T, V)
        loss = cross_entropy(logits, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for each in optimizers:
            each.step()
            each.zero_grad()
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
    return {name: each[WARMUP:] for name, each in seconds.items()}


def flops_per_token(model: GPT) -> int:
    """Return the FLOPs to train on one token: 6 N + 12 L C T.

    (Chowdhery et al. 2022, PaLM, appendix B; N parameters, L layers, T context.)
    """
    config = model.config
    attention = 12 * config.n_layer * config.n_embd * config.block_size
    return 6 * parameter_count(model) + attention


def measured_peak(dtype: torch.dtype) -> float:
    """Return the FLOP/s of large square matrix products: the best of twenty."""
    a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE).to(dtype)
    seconds = time_steps({"product": lambda: a @ b}, 20)["product"]
    return 2 * PEAK_SIZE**3 / min(seconds)


def compare_with_nanogpt(folder: Path | None, repeats: int) -> None:
    """Print the training speed of ours and nanoGPT in each of its shapes."""
    for name, (config, batch_size) in NANOGPT_SHAPES.items():
        steps = {"ours": training_step(config, batch_size)}
        if folder:
            for compiled in (False, True):
                step = nanogpt_training_step(folder, config, batch_size, compiled)
                steps[f"nanoGPT, compile {compiled}"] = step
        seconds = time_steps(steps, repeats)
        for label, taken in seconds.items():
            speed = batch_size * config.block_size / statistics.median(taken)
            ratio = median_ratio(taken, seconds["ours"])
            print(
                f"{name:<6} {label:<24}{speed:>9,.0f} characters/s  ours is {ratio:.2f} times as "
                "fast"
            )


def measure_utilization(repeats: int) -> None:
    """Print the model FLOP/s of each modern shape and optimizer, absolute and relative to the peak.

    The FLOP of the optimizer, such as Newton-Schulz in Muon, do not count.
    """
    dtype = device.select_runtime("cpu", "auto").dtype
    for name, (config, batch_size) in MODERN_SHAPES.items():
        flop = flops_per_token(GPT(config, VOCAB_SIZE)) * batch_size * config.block_size
        for optimizer in ("adamw", "muon"):
            step = training_step(config, batch_size, optimizer=optimizer)
            seconds = time_steps({"step": step}, repeats)["step"]
            flops = flop / statistics.median(seconds)
            print(
                f"{name}, {optimizer}: {flops / 1e9:.0f} GFLOP/s, "
                f"{flops / measured_peak(dtype):.0%} of the measured peak"
            )


def compare_contexts(repeats: int) -> None:
    """Print the time and the FLOP of a character in a long context, relative to a short one."""
    steps, flop = {}, {}
    for block_size in (SHORT, LONG):
        config = ModelConfig(n_layer=4, n_head=4, n_embd=256, block_size=block_size, **MODERN)
        steps[block_size] = training_step(config, CHARACTERS_PER_STEP // block_size)
        flop[block_size] = flops_per_token(GPT(config, VOCAB_SIZE))
    seconds = time_steps(steps, repeats)
    time_ratio, flop_ratio = median_ratio(seconds[LONG], seconds[SHORT]), flop[LONG] / flop[SHORT]
    print(
        f"context {LONG} against {SHORT}: {time_ratio:.2f} times the time per character, "
        f"{flop_ratio:.2f} times the FLOP; {time_ratio / flop_ratio:.2f} of the expected time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    keep_freed_memory()
    print(
        f"{torch.get_num_threads()} thread(s), {device.select_runtime('cpu', 'auto')}, "
        f"torch {torch.__version__}"
    )
    compare_with_nanogpt(options.nanogpt, options.steps)
    measure_utilization(options.steps)
    compare_contexts(options.steps)


if __name__ == "__main__":
    main()
