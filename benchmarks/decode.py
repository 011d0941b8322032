"""How fast is generation? python -m benchmarks.decode [--nanogpt FOLDER] [--repeats N]

Everything is a ratio of runs in turn, on the same weights, in float32, for the same number of characters; the median
over the repeats. FOLDER is a checkout of nanoGPT, whose own `generate` is then run; without it our own uncached
generation by nanoGPT's rule stands in. Hugging Face's `generate` is run where `transformers` is installed.
"""

import argparse
import importlib.util
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from configs.schema import ModelConfig
from model.generate import Sampler, Text
from model.gpt import GPT
from model.lean import LeanStep

VOCABULARY = 65
SHAPES = {
    "small": ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64),
    "baby": ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256),
}
TEMPERATURE = 0.8
BATCH = 64


class PlainText(Text):
    """A text that goes by `GPT.forward` alone."""

    _lean = None


def ours(model: GPT, prompt: int, characters: int, rows: int = 1, kind: type[Text] = Text, **options) -> None:
    """Draw `characters` after a prompt of that length."""
    text = kind(model, Sampler(1, range(rows), temperature=TEMPERATURE), **options)
    text.read(np.zeros((rows, prompt), np.int64))
    for _ in range(characters):
        text.draw()


def in_turn(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The seconds of every run, by its name: all of them once, then all of them again."""
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


# ------------------------------------------------------------------------------------------- the others


def nanogpt(folder: Path, model: GPT) -> torch.nn.Module:
    """nanoGPT's own model from a checkout of it, with our weights."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = model.config
    sizes = {name: getattr(config, name) for name in ("block_size", "n_layer", "n_head", "n_embd")}
    theirs = module.GPT(module.GPTConfig(vocab_size=VOCABULARY, dropout=0.0, bias=False, **sizes)).eval()
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
    choice = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "use_cache": True, "pad_token_id": 0}
    face.generate(begin, attention_mask=torch.ones_like(begin), max_new_tokens=characters, **choice)


@torch.no_grad()
def copy_weights(theirs: dict[str, torch.Tensor], model: GPT, transposed: bool) -> None:
    """Our weights into tensors with GPT-2's names, whose matrices may be transposed; biases become 0."""
    own = {"wte": model.token_embedding, "wpe": model.position_embedding, "ln_f": model.norm}
    for i, block in enumerate(model.blocks):
        parts = {
            "ln_1": block.norm_1,
            "attn.c_attn": block.attention.projection.qkv,
            "attn.c_proj": block.attention.output,
            "ln_2": block.norm_2,
            "mlp.c_fc": block.mlp.up,
            "mlp.c_proj": block.mlp.down,
        }
        own |= {f"h.{i}.{name}": part for name, part in parts.items()}
    for name, module in own.items():
        flip = transposed and name.endswith(("c_attn", "c_proj", "c_fc"))
        theirs[f"transformer.{name}.weight"].copy_(module.weight.T if flip else module.weight)
        if f"transformer.{name}.bias" in theirs:
            theirs[f"transformer.{name}.bias"].zero_()


# --------------------------------------------------------------------------------------- the comparisons


@torch.inference_mode()
def check_logits(model: GPT, others: dict[str, Callable]) -> None:
    """Print the largest difference of each one's logits from ours, over a whole window."""
    ids = torch.randint(VOCABULARY, (1, model.config.block_size), generator=torch.Generator().manual_seed(0))
    expected, caches = model(ids)[0], model.new_caches()
    first, step = model(ids[:, :1], caches)[0], LeanStep(model)
    lean = [torch.from_numpy(step(ids[0, i].item(), caches)) for i in range(1, ids.size(1))]
    logits = {"lean step": torch.cat([first, *lean])} | {name: call(ids)[0] for name, call in others.items()}
    for name, found in logits.items():
        print(f"  logits of {name}: within {(found - expected).abs().max():.1e} of GPT.forward's")


def compare(model: GPT, folder: Path | None, repeats: int) -> None:
    """Against uncached generation, inside and past the window, and against Hugging Face's cache inside it."""
    block_size, others = model.config.block_size, {}
    theirs, face = nanogpt(folder, model) if folder else None, hugging_face(model)
    if theirs:
        others["nanoGPT"] = lambda ids: theirs(ids, ids)[0]
    if face:
        others["Hugging Face"] = lambda ids: face(ids).logits
    check_logits(model, others)
    for place, prompt in (("inside the window", 1), ("past the window", block_size)):
        characters, begin = block_size - 1, torch.zeros(1, prompt, dtype=torch.int64)
        runs = {"ours": lambda p=prompt, n=characters: ours(model, p, n)}
        if theirs:
            runs["nanoGPT"] = lambda b=begin, n=characters: theirs.generate(b, n, temperature=TEMPERATURE)
        else:
            runs["uncached"] = lambda p=prompt, n=characters: ours(model, p, n, cache=False, window="exact")
        if face and prompt == 1:
            runs["Hugging Face"] = lambda b=begin, n=characters: generate_by(face, b, n)
        seconds = in_turn(runs, repeats)
        for name, taken in seconds.items():
            times = f"ours is {ratio(taken, seconds['ours']):.1f} times as fast" if name != "ours" else ""
            print(f"  {place:<18} {name:<13}{characters / statistics.median(taken):>9,.0f} characters/s  {times}")


def batch(model: GPT, repeats: int) -> None:
    """64 samples at once against one stream of the same PyTorch step."""
    characters = min(64, model.config.block_size - 1)
    runs = {
        "one stream": lambda: ours(model, 1, characters, kind=PlainText),
        "64 samples": lambda: ours(model, 1, characters, BATCH),
    }
    seconds = in_turn(runs, repeats)
    one, many = (statistics.median(seconds[name]) for name in runs)
    print(
        f"  PyTorch step: one stream {characters / one:,.0f} characters/s, {BATCH} samples "
        f"{BATCH * characters / many:,.0f}, {BATCH * ratio(seconds['one stream'], seconds['64 samples']):.1f} times"
    )


def flatness(model: GPT, repeats: int) -> None:
    """The cost of a character in the second window against that in the tenth, and memory taken between the two."""
    block_size, ratios, grown = model.config.block_size, [], 0
    for _ in range(repeats):
        text, seconds = Text(model, Sampler(1, temperature=TEMPERATURE)), []
        text.read(np.zeros((1, block_size), np.int64))
        for window in range(9):
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(block_size):
                text.draw()
            seconds.append(time.perf_counter() - began)
            grown += (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (window > 0)
        ratios.append(seconds[-1] / seconds[0])
    print(f"  a character at 10 x block_size costs {statistics.median(ratios):.2f} times that at block_size", end="; ")
    print(f"memory grew by {grown} kB")


def bandwidth(model: GPT, repeats: int) -> None:
    """Reading the weights once, which each character must, against the whole step."""
    weights = torch.ones(sum(parameter.numel() for parameter in model.parameters()))
    characters = model.config.block_size - 1
    runs = {"step": lambda: ours(model, 1, characters), "read": lambda: [weights.sum() for _ in range(characters)]}
    seconds = in_turn(runs, repeats)
    speed = 4 * weights.numel() * characters / statistics.median(seconds["read"]) / 1e9
    share = ratio(seconds["read"], seconds["step"])
    print(f"  reading all weights, at {speed:.0f} GB/s, takes {share:.0%} of the time of a character")


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
            f"context {config.block_size}, {model.parameter_count():,} parameters, {torch.get_num_threads()} threads"
        )
        compare(model, options.nanogpt, options.repeats)
        for question in (batch, flatness, bandwidth):
            question(model, options.repeats)


if __name__ == "__main__":
    main()
