"""Cost of every attention layout with every kernel: python -m benchmarks.attention

One layer of causal self-attention on the CPU. Times are ratios to the default pair (fused, sdpa),
which is timed right before each measurement; the table has the medians over the repeats, and the
default's own row shows the noise. Peak memory is the most that tensors occupy at once in a forward
and backward pass, without weights and input. tests/test_attention.py shows that all compute the
same.

B batch, T tokens, C n_embd, H n_head, D head size
"""

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model.attention import KERNELS, LAYOUTS, MultiHeadAttention
from model.kv_cache import LayerCache

SIZES = {  # B, T, C, H
    "toy": (2, 8, 16, 2),
    "small": (12, 64, 128, 4),
    "baby": (16, 256, 384, 6),
}
DEFAULT = ("fused", "sdpa")
MIN_SECONDS = 0.02  # per timing: as many calls as take the default pair this long

Pair = tuple[str, str]  # layout and kernel

# ---------------------------------------------------------------------------------------- workloads


def forward(layer: MultiHeadAttention, x: Tensor) -> None:
    """Run a forward pass without autograd: x (B, T, C)."""
    with torch.no_grad():
        layer(x)


def forward_backward(layer: MultiHeadAttention, x: Tensor) -> None:
    """Run a forward and a backward pass, to the input and the parameters."""
    y = layer(x).float()
    torch.autograd.grad(y, [x, *layer.parameters()], x.detach())


def cached_decode(layer: MultiHeadAttention, x: Tensor) -> None:
    """Process the first text of `x` one token at a time with a KV cache, as generation does."""
    cache = LayerCache(x.size(1))
    with torch.inference_mode():
        for t in range(x.size(1)):
            layer(x[:1, t : t + 1], cache=cache)


WORKLOADS = {
    "forward": forward,
    "forward + backward": forward_backward,
    "cached decode": cached_decode,
}

# ------------------------------------------------------------------------------------- measurements


def seconds_per_call(
    workload: Callable, layer: MultiHeadAttention, x: Tensor, number: int
) -> float:
    """Return the mean seconds of `number` calls."""
    return timeit.timeit(functools.partial(workload, layer, x), number=number) / number


def time_pairs(
    workload: Callable, layers: dict[Pair, MultiHeadAttention], x: Tensor, repeats: int
) -> tuple[dict[Pair, list[float]], float]:
    """Return each pair's time ratios to the default, one per repeat, and the default's seconds."""
    for layer in layers.values():
        workload(layer, x)  # warm up
    default = layers[DEFAULT]
    number = math.ceil(MIN_SECONDS / seconds_per_call(workload, default, x, 1))
    ratios, default_seconds = {pair: [] for pair in layers}, []
    for _ in range(repeats):
        for pair, layer in layers.items():
            default_seconds.append(seconds_per_call(workload, default, x, number))
            seconds = seconds_per_call(workload, layer, x, number)
            ratios[pair].append(seconds / default_seconds[-1])
    return ratios, statistics.median(default_seconds)


def peak_bytes(layer: MultiHeadAttention, x: Tensor) -> int:
    """Return the most bytes that a forward and backward pass has allocated at once."""
    with torch.profiler.profile(profile_memory=True) as profile:
        forward_backward(layer, x)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    return max(itertools.accumulate(change for _, change in changes))


# ------------------------------------------------------------------------------------------- report


def measure(size: str, repeats: int) -> None:
    """Print the table of one size."""
    B, T, C, H = SIZES[size]
    layers = {
        (layout, kernel): MultiHeadAttention(C, H, layout=layout, kernel=kernel)
        for layout, kernel in itertools.product(LAYOUTS, KERNELS)
    }
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(1)).requires_grad_()

    megabytes = {pair: peak_bytes(layer, x) / 1e6 for pair, layer in layers.items()}
    ratios, default_times = {}, []
    for name, workload in WORKLOADS.items():
        ratios[name], seconds = time_pairs(workload, layers, x, repeats)
        default_times.append(f"{name} {1e3 * seconds:.2f} ms")

    print(f"\n{size}: B {B}, T {T}, C {C}, H {H}. ", end="")
    print(f"{', '.join(DEFAULT)}: {', '.join(default_times)} for {T} tokens of one text\n")
    print(f"| layout | kernel | {' | '.join(WORKLOADS)} | peak MB |")
    print("| --- | --- |" + " ---: |" * (len(WORKLOADS) + 1))
    for pair in layers:
        medians = [f"{statistics.median(ratios[name][pair]):.2f}" for name in WORKLOADS]
        cells = [*pair, *medians, f"{megabytes[pair]:.1f}"]
        print(f"| {' | '.join(cells)} |")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "baby"])
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: by autocast"
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    os.environ["KINETO_LOG_LEVEL"] = "99"  # silences the profiler's start and stop messages
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    print(
        f"{options.dtype}, {threads} thread(s), {capability}, torch {torch.__version__}, "
        f"{options.repeats} repeats"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "bfloat16"):
        for size in options.sizes:
            measure(size, options.repeats)


if __name__ == "__main__":
    main()
