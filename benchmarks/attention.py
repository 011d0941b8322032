"""Cost of every attention layout with every kernel: python -m benchmarks.attention

One layer of causal self-attention on the CPU. Times are ratios to the default pair (fused, sdpa),
which is timed right before each measurement; the table has the medians over the repeats, and the
default's own row shows the noise. tests/test_attention.py shows that all compute the same.

B batch, T tokens, C n_embd, H n_head
"""

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from model.attention import KERNELS, LAYOUTS, MultiHeadAttention
from model.kv_cache import LayerCache

SIZES = {  # B, T, C, H
    "toy": (2, 8, 16, 2),
    "small": (12, 64, 128, 4),
    "baby": (16, 256, 384, 6),
}
DEFAULT = ("fused", "sdpa")
MIN_SECONDS = 0.02  # of a measurement


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


def milliseconds(workload: Callable, layer: MultiHeadAttention, x: Tensor) -> float:
    """Return the median milliseconds of a call, from calls that take MIN_SECONDS or more."""
    names = {"workload": workload, "layer": layer, "x": x}
    timer = Timer("workload(layer, x)", globals=names, num_threads=torch.get_num_threads())
    return 1000 * timer.blocked_autorange(min_run_time=MIN_SECONDS).median


def measure(size: str, repeats: int) -> None:
    """Print the table of one size."""
    B, T, C, H = SIZES[size]
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layers = {
        (layout, kernel): MultiHeadAttention(C, H, layout=layout, kernel=kernel)
        for layout, kernel in itertools.product(LAYOUTS, KERNELS)
    }
    rows, defaults = {pair: [*pair] for pair in layers}, []
    for name, workload in WORKLOADS.items():
        times = []  # of the default
        for pair, layer in layers.items():
            ratios = []
            for _ in range(repeats):
                times.append(milliseconds(workload, layers[DEFAULT], x))
                ratios.append(milliseconds(workload, layer, x) / times[-1])
            rows[pair].append(f"{statistics.median(ratios):.2f}")
        defaults.append(f"{name} {statistics.median(times):.2f} ms")

    print(f"\n{size}: B {B}, T {T}, C {C}, H {H}. ", end="")
    print(f"{', '.join(DEFAULT)}: {', '.join(defaults)} for {T} tokens of one text\n")
    print(f"| layout | kernel | {' | '.join(WORKLOADS)} |")
    print("| --- | --- |" + " ---: |" * len(WORKLOADS))
    for row in rows.values():
        print(f"| {' | '.join(row)} |")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "baby"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    print(f"{options.dtype}, {threads} thread(s), {capability}, torch {torch.__version__}")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "bfloat16"):
        for size in options.sizes:
            measure(size, options.repeats)


if __name__ == "__main__":
    main()
