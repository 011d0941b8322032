"""Generate texts with and without a KV cache.

    python -m tests.stress.cached_text [--full]

Shows that the cache changes nothing: with random models, prompts, batches and samplers in float64,
up to ten windows long, the characters are equal and the logits differ by at most 1e-12. One long
text in float32 then compares model/decode.py with GPT.forward. The full form has 1,000 cases and
100,000 characters.
"""

import random

import numpy as np
import torch

from configs.schema import KERNELS, LAYOUTS, ModelConfig
from model.generate import Generation, Sampler
from model.gpt import GPT
from tests.stress import main

VOCABULARY = 13


class RecordingSampler(Sampler):
    """A sampler that stores the last logits."""

    def __call__(self, logits):
        self.logits = logits.copy()
        return super().__call__(logits)


def random_model(rng: random.Random, **fixed) -> GPT:
    """Build a small random model, with weights large enough for non-uniform predictions."""
    n_head = rng.choice([1, 2, 3])
    choices = {
        "attention": rng.choice(LAYOUTS),
        "kernel": rng.choice(KERNELS),
        "positions": rng.choice(["learned", "rope"]),
        "token_shifts": rng.choice([0, 3]),
        "norm": rng.choice(["layernorm", "rmsnorm"]),
        "mlp": rng.choice(["gelu", "relu2", "swiglu"]),
        "bias": rng.choice([False, True]),
        "tied": rng.choice([False, True]),
        "qk_norm": rng.choice([False, True]),
        "logit_softcap": rng.choice([0.0, 15.0]),
        "logit_scale": rng.choice([1.0, 0.8]),
        "block_size": rng.choice([1, 2, 3, 5, 8, 16]),
        "n_layer": rng.choice([1, 2]),
        "n_head": n_head,
        "n_embd": n_head * rng.choice([2, 4, 8]),
        "dropout": 0.1,
    }
    model = GPT(ModelConfig(**choices | fixed), VOCABULARY, seed=rng.randrange(2**32))
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def random_sampler(rng: random.Random, rows: int):
    seed = rng.randrange(2**32)
    settings = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 2.0]),
        "top_k": rng.choice([0, 0, 3]),
        "top_p": rng.choice([1.0, 1.0, 0.8]),
        "min_p": rng.choice([0.0, 0.0, 0.1]),
    }
    return lambda: RecordingSampler(seed, range(rows), **settings)


def compare(cached: Generation, uncached: Generation, characters: int) -> tuple[int, float]:
    """Return the number of steps with different characters and the largest difference of logits.

    After each step, the character of `cached` is copied to `uncached`, so that one difference does
    not cause others.
    """
    different, largest = 0, 0.0
    for _ in range(characters):
        cached_ids, uncached_ids = cached.step(), uncached.step()
        different += not np.array_equal(cached_ids, uncached_ids)
        uncached.ids[:, -1] = cached_ids
        largest = max(largest, float(np.abs(cached.sampler.logits - uncached.sampler.logits).max()))
    return different, largest


def random_cases(cases: int, **fixed) -> dict[str, float]:
    """Return counts over random cases in float64, each up to ten windows long."""
    counts = {"cases": cases, "characters": 0, "different": 0, "largest difference": 0.0}
    for case in range(cases):
        rng = random.Random(case)
        model, rows = random_model(rng, **fixed).double(), rng.choice([1, 1, 2, 5])
        sampler = random_sampler(rng, rows)
        block_size = model.config.block_size
        prompt = np.array(
            [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3 * block_size))]] * rows
        )
        texts = [Generation(model, sampler(), cache=cache) for cache in (True, False)]
        for text in texts:
            text.append(prompt)
        different, largest = compare(*texts, characters := rng.randint(1, 10 * block_size))
        counts["characters"] += rows * characters
        counts["different"] += different
        counts["largest difference"] = max(counts["largest difference"], largest)
    return counts


def flips(characters: int) -> dict[str, float]:
    """Return counts over one long text in float32, at temperature 0.8."""
    model = random_model(
        random.Random(0), n_layer=2, n_head=4, n_embd=64, block_size=64, kernel="sdpa"
    )
    texts = [
        Generation(model, RecordingSampler(1, temperature=0.8), cache=cache)
        for cache in (True, False)
    ]
    for text in texts:
        text.append(np.zeros((1, 1), np.int64))
    different, largest = compare(*texts, characters)
    return {"characters": characters, "different": different, "largest difference": largest}


def stress(full: bool) -> str:
    torch.set_num_threads(1)
    exact = random_cases(1000 if full else 40)
    fast = flips(100_000 if full else 200)
    assert exact["different"] == 0 and exact["largest difference"] < 1e-12, exact
    assert fast["different"] == 0 and fast["largest difference"] < 1e-4, fast
    return (
        f"{exact['cases']} cached texts of {exact['characters']:,} characters in float64: 0 "
        f"differ from uncached ones, logits by up to {exact['largest difference']:.1e}; "
        f"with model/decode.py 0 of {fast['characters']:,} characters in float32, logits by up to "
        f"{fast['largest difference']:.1e}"
    )


if __name__ == "__main__":
    main(stress)
