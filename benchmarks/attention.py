"""What does each spelling of attention cost? Every layout with every kernel: python -m
benchmarks.attention

One layer of causal self-attention on the CPU. Times are ratios to the default pair (fused, sdpa),
timed in turn with it, the median of the repeats; so the default's own row shows the noise. Memory
is the most that tensors hold at once, above weights and input, in a forward and backward pass. The
difference is the largest, of output and input gradient, from the formula in float64, as a share of
the largest number there.

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
from model.kv_cache import KVCache

SIZES = {  # B, T, C, H
    "toy": (2, 8, 16, 2),
    "small": (12, 64, 128, 4),
    "baby": (16, 256, 384, 6),
}
DEFAULT = ("fused", "sdpa")


def forward(layer: MultiHeadAttention, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def both(layer: MultiHeadAttention, x: Tensor) -> list[Tensor]:
    """Output, gradient to the input, gradients to the parameters."""
    y = layer(x).float()
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], x.detach())]


def decode(layer: MultiHeadAttention, x: Tensor) -> None:
    """The first text of `x`, read one token at a time, as generation does."""
    cache = KVCache(x.size(1))
    with torch.inference_mode():
        for t in range(x.size(1)):
            layer(x[:1, t : t + 1], cache=cache)


WORK = {"forward": forward, "forward + backward": both, "cached decode": decode}


def seconds(work: Callable, layer: MultiHeadAttention, x: Tensor, number: int) -> float:
    return timeit.timeit(functools.partial(work, layer, x), number=number) / number


def times(work: Callable, layers: dict, x: Tensor, repeats: int) -> tuple[dict, float]:
    """Each pair's times as ratios to the default pair's, one a repeat, and the default's own median
    in seconds.
    """
    for layer in layers.values():
        work(layer, x)
    number = math.ceil(0.02 / seconds(work, layers[DEFAULT], x, 1))  # at least 20 ms a timing
    ratios, own = {pair: [] for pair in layers}, []
    for _, (pair, layer) in itertools.product(range(repeats), layers.items()):
        own.append(seconds(work, layers[DEFAULT], x, number))
        ratios[pair].append(seconds(work, layer, x, number) / own[-1])
    return ratios, statistics.median(own)


def peak_bytes(layer: MultiHeadAttention, x: Tensor) -> int:
    """The most that is allocated at once, above what is there before, in a forward and backward
    pass.
    """
    with torch.profiler.profile(profile_memory=True) as profile:
        both(layer, x)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    return max(itertools.accumulate(change for _, change in changes))


def exact(layer: MultiHeadAttention, x: Tensor) -> list[Tensor]:
    """Output and gradient to the input by the formula, in float64."""
    x = x.detach().double().requires_grad_()
    heads = [layer.projection.head_weights(h) for h in range(layer.projection.n_head)]
    Wq, Wk, Wv = (
        torch.stack([head[part] for head in heads]).double() for part in range(3)
    )  # (H, D, C)
    q, k, v = (torch.einsum("btc,hdc->bhtd", x, W) for W in (Wq, Wk, Wv))
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / q.size(-1) ** 0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    y = torch.einsum("bhts,bhsd->bthd", weights, v).flatten(2) @ layer.out_proj.weight.double().T
    return [y, *torch.autograd.grad(y, x, x.detach())]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)
    )


def measure(size: str, repeats: int) -> None:
    """Print the table of one size."""
    B, T, C, H = SIZES[size]
    layers = {}
    for pair in itertools.product(LAYOUTS, KERNELS):
        layers[pair] = MultiHeadAttention(C, H, layout=pair[0], kernel=pair[1])
        layers[pair].reset_parameters(torch.Generator().manual_seed(0), C**-0.5, C**-0.5)
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(1)).requires_grad_()
    truth = exact(layers[DEFAULT], x)
    differences = {pair: difference(both(layer, x)[:2], truth) for pair, layer in layers.items()}
    megabytes = {pair: peak_bytes(layer, x) / 1e6 for pair, layer in layers.items()}
    timed = {name: times(work, layers, x, repeats) for name, work in WORK.items()}

    own = ", ".join(f"{name} {1e3 * own:.2f} ms" for name, (_, own) in timed.items())
    print(
        f"\n{size}: B {B}, T {T}, C {C}, H {H}. {', '.join(DEFAULT)}: {own} for {T} tokens of one "
        f"text\n"
    )
    print(f"| layout | kernel | {' | '.join(WORK)} | peak MB | difference |")
    print("| --- | --- |" + " ---: |" * (len(WORK) + 2))
    for pair in layers:
        medians = " | ".join(
            f"{statistics.median(ratios[pair]):.2f}" for ratios, _ in timed.values()
        )
        print(
            f"| {pair[0]} | {pair[1]} | {medians} | {megabytes[pair]:.1f} | "
            f"{differences[pair]:.0e} |"
        )
    print()
    for name, (ratios, _) in timed.items():
        faster = {
            pair: statistics.median(each)
            for pair, each in ratios.items()
            if max(each) < 1 and pair != DEFAULT
        }
        best = min(faster, key=faster.get, default=())
        share = f", at {faster[best]:.2f} of its time" if best else ""
        print(
            f"- {name}: {', '.join(best) or 'no pair'} is faster than the default in every "
            f"repeat{share}"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "baby"])
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: by autocast"
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    os.environ["KINETO_LOG_LEVEL"] = (
        "99"  # or the profiler tells of each of its beginnings and ends
    )
    threads, processor = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    print(
        f"{options.dtype}, {threads} threads, {processor}, torch {torch.__version__}, "
        f"{options.repeats} repeats"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "bfloat16"):
        for size in options.sizes:
            measure(size, options.repeats)


if __name__ == "__main__":
    main()
