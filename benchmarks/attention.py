"""Cost of every attention layout with every kernel: python -m benchmarks.attention

One layer of causal self-attention on the CPU: the median times of a call, and for `cached decode`
of T calls. tests/test_attention.py shows that all compute the same.

B batch, T tokens, C n_embd, H n_head
"""

import argparse
import itertools

import torch
from torch import Tensor
from torch.utils.benchmark import Compare, Measurement, Timer

from model.attention import KERNELS, LAYOUTS, MultiHeadAttention
from model.kv_cache import LayerCache

SIZES = {  # B, T, C, H
    "small": (12, 64, 128, 4),
    "baby": (16, 256, 384, 6),
}


def forward(layer: MultiHeadAttention, x: Tensor) -> None:
    """Run a forward pass without autograd: x (B, T, C)."""
    with torch.no_grad():
        layer(x, causal=True)


def forward_backward(layer: MultiHeadAttention, x: Tensor) -> None:
    """Run a forward and a backward pass, to the input and the parameters."""
    y = layer(x, causal=True).float()
    torch.autograd.grad(y, [x, *layer.parameters()], x.detach())


def cached_decode(layer: MultiHeadAttention, x: Tensor) -> None:
    """Process the first text of `x` one token at a time with a KV cache, as generation does."""
    cache = LayerCache(x.size(1))
    with torch.inference_mode():
        for t in range(x.size(1)):
            layer(x[:1, t : t + 1], causal=True, cache=cache)


WORKLOADS = {
    "forward": forward,
    "forward + backward": forward_backward,
    "cached decode": cached_decode,
}


def measure(size: str, min_seconds: float) -> list[Measurement]:
    """Measure each workload for each pair of layout and kernel, for `min_seconds` or more."""
    B, T, C, H = SIZES[size]
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(1)).requires_grad_()
    measurements = []
    for (name, workload), layout, kernel in itertools.product(WORKLOADS.items(), LAYOUTS, KERNELS):
        layer = MultiHeadAttention(C, H, layout=layout, kernel=kernel)
        timer = Timer(
            "workload(layer, x)",
            globals={"workload": workload, "layer": layer, "x": x},
            label=f"{size}: B {B}, T {T}, C {C}, H {H}",
            sub_label=f"{layout}, {kernel}",
            description=name,
            num_threads=torch.get_num_threads(),
        )
        measurements.append(timer.blocked_autorange(min_run_time=min_seconds))
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement")
    options = parser.parse_args()
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{options.dtype}, {capability}, torch {torch.__version__}")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "bfloat16"):
        for size in options.sizes:
            Compare(measure(size, options.seconds)).print()


if __name__ == "__main__":
    main()
