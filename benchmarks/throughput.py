"""Characters trained on in a second: python -m benchmarks.throughput [--nanogpt FOLDER] [--steps N]

Whole training steps (forward, backward, clipping, optimizer) of nanoGPT's own architecture, batch
and dropout, ours and nanoGPT's in turn, step by step; then what share of the peak of large matrix
products our own recipes reach, and what a character costs in a long context against a short one.
Without FOLDER ours in float32 stands in for nanoGPT.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.decode import VOCABULARY, nanogpt_module
from configs.schema import ModelConfig, TrainConfig
from model.gpt import GPT
from training import runtime
from training.evaluate import cross_entropy
from training.optimizers import build

MODERN = {
    "kernel": "batched",
    "positions": "rope",
    "mlp": "relu2",
    "qk_norm": True,
    "residual_init": "zero",
}
MODERN |= {"tied": False, "logit_softcap": 15.0}
CLASSIC = {  # nanoGPT's two recipes, the second with a batch for a CPU
    "small": (ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, kernel="batched"), 12),
    "baby": (
        ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2, kernel="batched"),
        16,
    ),
}
SHARES = {
    "4 x 256, context 128": (
        ModelConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, **MODERN),
        24,
    ),
    "6 x 384, context 256": (
        ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, **MODERN),
        12,
    ),
}
CONTEXTS = {
    size: (ModelConfig(n_layer=4, n_head=4, n_embd=256, block_size=size, **MODERN), 4096 // size)
    for size in (64, 1024)
}


def ours(
    config: ModelConfig, batch_size: int, dtype: str = "auto", optimizer: str = "adamw"
) -> Callable[[], object]:
    """One training step, as train.py takes it."""
    where, model = runtime.select_runtime("cpu", dtype), GPT(config, VOCABULARY)
    optimizers = build(model, TrainConfig(optimizer=optimizer), where.dtype)
    x, y = torch.randint(VOCABULARY, (2, batch_size, config.block_size))

    def step():
        with where.autocast():
            logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for each in optimizers:
            each.step()
            each.zero_grad()
        return loss.item()

    return step


def nanogpt(
    folder: Path, config: ModelConfig, batch_size: int, compiled: bool
) -> Callable[[], object]:
    """One training step, as nanoGPT's train.py takes it on a CPU."""
    module = nanogpt_module(folder)
    sizes = {
        name: getattr(config, name)
        for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout")
    }
    model = module.GPT(module.GPTConfig(vocab_size=VOCABULARY, bias=False, **sizes))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    forward = torch.compile(model) if compiled else model
    x, y = torch.randint(VOCABULARY, (2, batch_size, config.block_size))

    def step():
        _, loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def in_turn(steps: dict[str, Callable[[], object]], times: int) -> dict[str, list[float]]:
    """Seconds of each step, one of each after the other; the first three of each are not
    counted.
    """
    seconds = {name: [] for name in steps}
    for _ in range(times + 3):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return {name: each[3:] for name, each in seconds.items()}


def peak(dtype: torch.dtype) -> float:
    """Operations per second of large square matrix products: the best of twenty."""
    a, b = torch.randn(2, 2048, 2048).to(dtype)
    seconds = in_turn({"product": lambda: a @ b}, 20)["product"]
    return 2 * 2048**3 / min(seconds)


def against_nanogpt(folder: Path | None, times: int) -> None:
    for name, (config, batch_size) in CLASSIC.items():
        steps = {"ours": ours(config, batch_size)}
        if folder:
            steps |= {
                f"nanoGPT, compile {on}": nanogpt(folder, config, batch_size, on)
                for on in (False, True)
            }
        else:
            steps["ours, float32"] = ours(config, batch_size, "float32")
        seconds, characters = in_turn(steps, times), batch_size * config.block_size
        for who, each in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(each, seconds["ours"], strict=True))
            speed = characters / statistics.median(each)
            print(
                f"{name:<6} {who:<24}{speed:>9,.0f} characters/s  ours is {ratio:.2f} times as fast"
            )


def share_of_peak(times: int) -> None:
    where = runtime.select_runtime("cpu", "auto")
    for name, (config, batch_size) in SHARES.items():
        operations = GPT(config, VOCABULARY).flops_per_token() * batch_size * config.block_size
        for optimizer in ("adamw", "muon"):
            seconds = in_turn({"ours": ours(config, batch_size, optimizer=optimizer)}, times)[
                "ours"
            ]
            speed = operations / statistics.median(seconds)
            print(
                f"{name}, {optimizer}: {speed / 1e9:.0f} GFLOP/s, {speed / peak(where.dtype):.0%} "
                f"of the peak"
            )


def long_context(times: int) -> None:
    seconds = in_turn({size: ours(*each) for size, each in CONTEXTS.items()}, times)
    operations = {
        size: GPT(config, VOCABULARY).flops_per_token() for size, (config, _) in CONTEXTS.items()
    }
    short, long = CONTEXTS
    ratio = statistics.median(b / a for a, b in zip(seconds[short], seconds[long], strict=True))
    theory = operations[long] / operations[short]
    print(
        f"context {long} over {short}: a character costs {ratio:.2f} times, by theory "
        f"{theory:.2f}; ",
        end="",
    )
    print(f"{ratio / theory:.2f} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    runtime.keep_freed_memory()
    print(
        f"{torch.get_num_threads()} threads, {runtime.select_runtime('cpu', 'auto')}, torch "
        f"{torch.__version__}"
    )
    against_nanogpt(options.nanogpt, options.steps)
    share_of_peak(options.steps)
    long_context(options.steps)


if __name__ == "__main__":
    main()
