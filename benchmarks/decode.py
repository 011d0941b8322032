"""Generation speed: python -m benchmarks.decode [--nanogpt FOLDER] [--repeats N]

Ours against Hugging Face's `generate` and, with FOLDER, a checkout of nanoGPT, nanoGPT's: the same
weights and number of characters, in float32, with one thread and with all. Runs alternate, and
ratios, of equal numbers of threads, are medians over the repeats. Models and weights are prepared
before the clock starts.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; pip install -r requirements-dev.txt") from None

from benchmarks.nanogpt import SHAPES, VOCAB_SIZE, build_nanogpt, shape
from benchmarks.timing import median_ratio, time_interleaved
from configs.schema import ModelConfig
from model.generate import Sampler, Texts
from model.gpt import GPT
from model.parameters import named_tensors, parameter_count

TEMPERATURE = 0.8
GPT2_NAMES = {  # a part of a parameter's name here -> in nanoGPT and Hugging Face
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks.": "transformer.h.",
    "attn_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "final_norm": "transformer.ln_f",
}


def prepare_ours(model: GPT, prompt_length: int, characters: int) -> Callable:
    """Return a call that writes `characters` after a prompt.

    After a prompt of block_size characters, the call starts past the window.
    """
    texts = Texts(model, Sampler(1, temperature=TEMPERATURE))
    texts.append(np.zeros((1, prompt_length), np.int64))
    if prompt_length == model.config.block_size:
        texts.write_one()

    def write() -> None:
        for _ in range(characters):
            texts.write_one()

    return write


def with_threads(threads: int, setup: Callable) -> Callable:
    """Return a setup whose call runs with so many PyTorch threads, then restores their number."""

    def prepare() -> Callable:
        call = setup()

        def run() -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            call()
            torch.set_num_threads(before)

        return run

    return prepare


# ------------------------------------------------------------------------ nanoGPT and Hugging Face


def build_hugging_face(config: ModelConfig) -> torch.nn.Module:
    """Build GPT-2 of `transformers`; its biases, which the models here lack, are zeros."""
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    sizes |= {"n_positions": config.block_size, "vocab_size": VOCAB_SIZE}
    no_tokens = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(activation_function="gelu", **sizes, **no_tokens))


def nanogpt_weights(model: GPT) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter under nanoGPT's name."""
    weights = {}
    for name, tensor in named_tensors(model).items():
        if name.endswith(".qkv"):
            tensor = tensor.flatten(0, 2)  # (3, H, D, C) -> (3*H*D, C)
        for ours, theirs in GPT2_NAMES.items():
            name = name.replace(ours, theirs)
        weights[f"{name}.weight"] = tensor
    return weights


def hugging_face_weights(model: GPT) -> dict[str, torch.Tensor]:
    """Return the same for Hugging Face, where the weight of a linear layer is (in, out)."""
    linear = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {
        name: tensor.T if name.endswith(linear) else tensor
        for name, tensor in nanogpt_weights(model).items()
    }


def generate_hugging_face(
    hugging_face: torch.nn.Module, prompt: torch.Tensor, characters: int
) -> None:
    """Generate with Hugging Face's KV cache after a prompt (1, T)."""
    hugging_face.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=characters,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        use_cache=True,
        pad_token_id=0,
    )


# -------------------------------------------------------------------------------------- comparisons


@torch.inference_mode()
def check_logits(model: GPT, others: dict[str, Callable]) -> None:
    """Print the largest difference of other logits from GPT.forward's, over a whole window.

    `others` map ids (1, block_size) to logits (block_size, V).
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (1, model.config.block_size), generator=generator)
    expected = model(ids)[0]  # (block_size, V)
    for name, call in others.items():
        difference = (call(ids) - expected).abs().max()
        print(f"  logits of {name} and GPT.forward: differences up to {difference:.1e}")


def compare_speed(model: GPT, folder: Path | None, repeats: int) -> None:
    """Print the speed of ours and the others, inside the window and past it.

    Hugging Face runs only inside: its cache does not move the window.
    """
    block_size, others, nanogpt = model.config.block_size, {}, None
    if folder:
        nanogpt = build_nanogpt(folder, model.config).eval()
        nanogpt.load_state_dict(nanogpt_weights(model), strict=False)  # without the tied lm_head
        others["nanoGPT"] = lambda ids: nanogpt(ids, ids)[0][0]  # all logits only with targets
    hugging_face = build_hugging_face(model.config).eval()
    hugging_face.load_state_dict(hugging_face_weights(model), strict=False)
    others["Hugging Face"] = lambda ids: hugging_face(ids).logits[0]
    check_logits(model, others)

    cases = (("inside", 1, block_size - 1), ("past", block_size, block_size // 2))
    for where, prompt_length, characters in cases:
        prompt = torch.zeros(1, prompt_length, dtype=torch.int64)
        setups = {"ours": partial(prepare_ours, model, prompt_length, characters)}
        if nanogpt:
            call = partial(nanogpt.generate, prompt, characters, temperature=TEMPERATURE)
            setups["nanoGPT"] = lambda call=call: call
        if where == "inside":
            call = partial(generate_hugging_face, hugging_face, prompt, characters)
            setups["Hugging Face"] = lambda call=call: call

        seconds = time_interleaved(
            {
                f"{name}, threads: {threads}": with_threads(threads, setup)
                for threads in sorted({1, torch.get_num_threads()})
                for name, setup in setups.items()
            },
            repeats,
        )
        for name, taken in seconds.items():
            speed = characters / statistics.median(taken)
            line = f"  {where} the window: {name:<25}{speed:>7,.0f} characters/s"
            program, threads = name.split(", ")
            if program != "ours":
                ratio = median_ratio(taken, seconds[f"ours, {threads}"])
                line += f"  ours is {ratio:.1f} times as fast"
            print(line)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args(argv)
    for name in options.shapes:
        config = shape(name, "--kernel=sdpa", "--dropout=0", "--attention_dropout=0")
        model = GPT(config, VOCAB_SIZE, seed=1).eval()
        print(
            f"{name}: {config.n_layer} layers, {config.n_head} heads, n_embd {config.n_embd}, "
            f"context {config.block_size}, {parameter_count(model):,} parameters, "
            f"{torch.get_num_threads()} thread(s)"
        )
        compare_speed(model, options.nanogpt, options.repeats)


if __name__ == "__main__":
    main()
