"""How fast is generation? python -m benchmarks.decode [--nanogpt FOLDER] [--repeats N]

Everything is a ratio of runs in turn, on the same weights, in float32, for the same number of
characters; the median over the repeats. Models are made and weights prepared before the clock
starts. FOLDER is a checkout of nanoGPT, whose own `generate` is then run; without it our own
uncached generation by nanoGPT's rule stands in. `generate` of Hugging Face is run where
`transformers` is installed. The others run with one thread and with all, ours as in sample.py.
"""

import argparse
import importlib.util
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from configs.schema import ModelConfig
from model.fast_decode import FastDecoder
from model.generate import Generation, Sampler
from model.gpt import GPT

VOCABULARY = 65
SHAPES = {
    "small": ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64),
    "baby": ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256),
}
TEMPERATURE = 0.8
BATCH = 64


def ours(model: GPT, prompt: int, characters: int, rows: int = 1, **options) -> Callable:
    """Return a call that draws `characters` after a prompt of the given length.

    With a prompt as long as the context they are drawn past the window, in a text under way.
    """
    text = Generation(model, Sampler(1, range(rows), temperature=TEMPERATURE), **options)
    text.append(np.zeros((rows, prompt), np.int64))
    if prompt == model.config.block_size:
        text.step()
    threads = text.decoder.threads if text.decoder else torch.get_num_threads()
    return partial(with_threads, threads, lambda: [text.step() for _ in range(characters)])


def with_threads(count: int, call: Callable) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    call()
    torch.set_num_threads(before)


def each_way(name: str, call: Callable) -> dict[str, Callable]:
    """Runs of `call` with one thread and with all that there are."""
    counts = sorted({1, torch.get_num_threads()})
    return {f"{name}, threads: {n}": lambda n=n: partial(with_threads, n, call) for n in counts}


def in_turn(runs: dict[str, Callable[[], Callable]], repeats: int) -> dict[str, list[float]]:
    """The seconds of every run, by its name: all of them once, then all of them again. What a run
    returns is timed.
    """
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name, prepared in runs.items():
            run = prepared()
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


# --------------------------------------------------------------------------------------- the others


def nanogpt_module(folder: Path):
    """The model.py of a checkout of nanoGPT."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nanogpt(folder: Path, model: GPT) -> torch.nn.Module:
    """nanoGPT's own model from a checkout of it, with our weights."""
    module, config = nanogpt_module(folder), model.config
    sizes = {name: getattr(config, name) for name in ("block_size", "n_layer", "n_head", "n_embd")}
    theirs = module.GPT(
        module.GPTConfig(vocab_size=VOCABULARY, dropout=0.0, bias=False, **sizes)
    ).eval()
    copy_weights(theirs.state_dict(), model, transposed=False)
    return theirs


def hugging_face(model: GPT) -> torch.nn.Module | None:
    """GPT-2 of `transformers` with exact GELU and our weights; None where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import GPT2Config, GPT2LMHeadModel

    config = model.config
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=config.block_size,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            activation_function="gelu",
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    copy_weights(theirs.state_dict(), model, transposed=True)
    return theirs


def generate_by(face: torch.nn.Module, begin: torch.Tensor, characters: int) -> None:
    """Hugging Face's own generation, with its cache."""
    choice = {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": 0,
        "use_cache": True,
        "pad_token_id": 0,
    }
    face.generate(begin, attention_mask=torch.ones_like(begin), max_new_tokens=characters, **choice)


@torch.no_grad()
def copy_weights(theirs: dict[str, torch.Tensor], model: GPT, transposed: bool) -> None:
    """Our weights into tensors with GPT-2's names, whose matrices may be transposed; biases become
    0.
    """
    own = {"wte": model.token_embedding, "wpe": model.position_embedding, "ln_f": model.final_norm}
    for i, block in enumerate(model.blocks):
        parts = {
            "ln_1": block.attn_norm,
            "attn.c_attn": block.attention.projection.qkv,
            "attn.c_proj": block.attention.out_proj,
            "ln_2": block.mlp_norm,
            "mlp.c_fc": block.mlp.up,
            "mlp.c_proj": block.mlp.down,
        }
        own |= {f"h.{i}.{name}": part for name, part in parts.items()}
    for name, module in own.items():
        flip = transposed and name.endswith(("c_attn", "c_proj", "c_fc"))
        theirs[f"transformer.{name}.weight"].copy_(module.weight.T if flip else module.weight)
        if f"transformer.{name}.bias" in theirs:
            theirs[f"transformer.{name}.bias"].zero_()


# ---------------------------------------------------------------------------------- the comparisons


@torch.inference_mode()
def check_logits(model: GPT, others: dict[str, Callable]) -> None:
    """Print the largest difference of each one's logits from ours, over a whole window."""
    ids = torch.randint(
        VOCABULARY, (1, model.config.block_size), generator=torch.Generator().manual_seed(0)
    )
    expected, caches = model(ids)[0], model.new_caches()
    first, step = model(ids[:, :1], caches)[0], FastDecoder(model)
    rest = [torch.from_numpy(step(ids[0, : i + 1].numpy(), caches)) for i in range(1, ids.size(1))]
    logits = {"the fast decoder": torch.cat([first, *rest])}
    logits |= {name: call(ids)[0] for name, call in others.items()}
    for name, found in logits.items():
        print(f"  logits of {name}: within {(found - expected).abs().max():.1e} of GPT.forward's")


def compare(model: GPT, folder: Path | None, repeats: int) -> None:
    """Against uncached generation, inside and past the window, and against Hugging Face's cache
    inside it.
    """
    block_size, others = model.config.block_size, {}
    theirs, face = nanogpt(folder, model) if folder else None, hugging_face(model)
    if theirs:
        others["nanoGPT"] = lambda ids: theirs(ids, ids)[0]
    if face:
        others["Hugging Face"] = lambda ids: face(ids).logits
    check_logits(model, others)
    began = time.perf_counter()
    FastDecoder(model)
    print(f"  preparing the weights takes {time.perf_counter() - began:.3f} s, once for a text")
    for place, prompt, characters in (
        ("inside", 1, block_size - 1),
        ("past", block_size, block_size // 2),
    ):
        begin, runs = (
            torch.zeros(1, prompt, dtype=torch.int64),
            {"ours": partial(ours, model, prompt, characters)},
        )
        if theirs:
            runs |= each_way(
                "nanoGPT", partial(theirs.generate, begin, characters, temperature=TEMPERATURE)
            )
        else:
            runs["uncached"] = partial(ours, model, prompt, characters, cache=False, window="exact")
        if face and prompt == 1:
            runs |= each_way("Hugging Face", partial(generate_by, face, begin, characters))
        seconds = in_turn(runs, repeats)
        for name, taken in seconds.items():
            times = (
                f"ours is {ratio(taken, seconds['ours']):.1f} times as fast"
                if name != "ours"
                else ""
            )
            rate = characters / statistics.median(taken)
            print(f"  {place} the window: {name:<25}{rate:>7,.0f} characters/s  {times}")


def batch(model: GPT, repeats: int) -> None:
    """64 samples at once against one stream of the same PyTorch step."""
    characters = min(64, model.config.block_size - 1)
    runs = {
        "one stream": partial(ours, model, 1, characters, fast=False),
        "64 samples": partial(ours, model, 1, characters, BATCH),
    }
    seconds = in_turn(runs, repeats)
    one, many = (statistics.median(seconds[name]) for name in runs)
    print(
        f"  PyTorch step: one stream {characters / one:,.0f} characters/s, {BATCH} samples "
        f"{BATCH * characters / many:,.0f}, "
        f"{BATCH * ratio(seconds['one stream'], seconds['64 samples']):.1f} times"
    )


def flatness(model: GPT, repeats: int) -> None:
    """The cost of a character in the second window against that in the tenth, and memory taken
    between the two.
    """
    block_size, ratios, grown = model.config.block_size, [], 0
    for _ in range(repeats):
        draw_a_window, seconds = ours(model, block_size, block_size), []
        for window in range(9):
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            draw_a_window()
            seconds.append(time.perf_counter() - began)
            grown += (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (window > 0)
        ratios.append(seconds[-1] / seconds[0])
    print(
        f"  a character at 10 x block_size costs {statistics.median(ratios):.2f} times that at "
        f"block_size",
        end="; ",
    )
    print(f"memory grew by {grown} kB")


def bandwidth(model: GPT, repeats: int) -> None:
    """Reading the weights once, which each character must, against the whole step."""
    weights = torch.ones(sum(parameter.numel() for parameter in model.parameters()))
    characters = model.config.block_size - 1
    runs = {
        "step": partial(ours, model, 1, characters),
        "read": lambda: lambda: [weights.sum() for _ in range(characters)],
    }
    seconds = in_turn(runs, repeats)
    speed = 4 * weights.numel() * characters / statistics.median(seconds["read"]) / 1e9
    share = ratio(seconds["read"], seconds["step"])
    print(
        f"  reading all weights, at {speed:.0f} GB/s, takes {share:.0%} of the time of a character"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    for name in options.shapes:
        config, model = SHAPES[name], GPT(SHAPES[name], VOCABULARY, seed=1).eval()
        print(
            f"{name}: {config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, "
            f"context {config.block_size}, {model.parameter_count():,} parameters, "
            f"{torch.get_num_threads()} threads"
        )
        compare(model, options.nanogpt, options.repeats)
        for question in (batch, flatness, bandwidth):
            question(model, options.repeats)


if __name__ == "__main__":
    main()
