"""Generate texts with and without a KV cache.

    python -m tests.stress.cached_text [--full]

Shows that the cache changes nothing: with random models, prompts, batches and samplers in float64,
up to ten windows long, the characters are equal and the logits differ by at most 1e-12. One long
text is in float32. The full form has 1,000 cases and 100,000 characters.
"""

import random

import numpy as np
import torch

from configs.schema import KERNELS, LAYOUTS, ModelConfig
from model.generate import Sampler, Texts
from model.gpt import GPT
from tests.stress import main
from tests.variants import CHOICES, noisy

VOCABULARY = 13
MODELS = CHOICES | {
    "layout": LAYOUTS,
    "kernel": KERNELS,
    "logit_scale": (1.0, 0.8),
    "block_size": (1, 2, 3, 5, 8, 16),
    "n_layer": (1, 2),
    "n_head": (1, 2, 3),
}
SAMPLING = {
    "temperature": (0.0, 0.5, 1.0, 2.0),
    "top_k": (0, 0, 3),
    "top_p": (1.0, 1.0, 0.8),
    "min_p": (0.0, 0.0, 0.1),
}


class RecordingSampler(Sampler):
    """A sampler that stores the last logits."""

    def __call__(self, logits):
        self.logits = logits.copy()
        return super().__call__(logits)


def choose(rng: random.Random, choices: dict) -> dict:
    return {name: rng.choice(values) for name, values in choices.items()}


def compare(model: GPT, prompt: np.ndarray, characters: int, seed: int, **sampling) -> float:
    """Write texts with a cache and without; return the largest difference of their logits."""
    cached, uncached = (
        Texts(model, RecordingSampler(seed, range(len(prompt)), **sampling), cache=cache)
        for cache in (True, False)
    )
    largest = 0.0
    for text in (cached, uncached):
        text.append(prompt)
    for _ in range(characters):
        assert np.array_equal(cached.write_one(), uncached.write_one())
        largest = max(largest, float(np.abs(cached.sampler.logits - uncached.sampler.logits).max()))
    return largest


def random_case(rng: random.Random) -> tuple[int, float]:
    """Compare texts in float64, up to ten windows long; return their length and the difference."""
    chosen = choose(rng, MODELS)
    chosen["n_embd"] = chosen["n_head"] * rng.choice([2, 4, 8])
    model = GPT(ModelConfig(**chosen, dropout=0.1), VOCABULARY, seed=rng.randrange(2**32))
    model = noisy(model, seed=rng.randrange(2**32)).double()
    window = chosen["block_size"]
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3 * window))]
    rows, characters = rng.choice([1, 1, 2, 5]), rng.randint(1, 10 * window)
    seed, sampling = rng.randrange(2**32), choose(rng, SAMPLING)
    largest = compare(model, np.array([prompt] * rows), characters, seed, **sampling)
    return rows * characters, largest


def stress(full: bool) -> str:
    torch.set_num_threads(1)
    cases, long = (1000, 100_000) if full else (12, 200)
    lengths, differences = zip(*(random_case(random.Random(n)) for n in range(cases)), strict=True)
    assert max(differences) < 1e-12

    config = ModelConfig(n_layer=2, n_head=4, n_embd=64, block_size=64, kernel="sdpa")
    model = noisy(GPT(config, VOCABULARY))
    difference = compare(model, np.zeros((1, 1), np.int64), long, seed=1, temperature=0.8)
    assert difference < 1e-4
    return (
        f"{cases} cached texts of {sum(lengths):,} characters in float64: 0 differ from uncached "
        f"ones, logits by up to {max(differences):.1e}; 0 of {long:,} "
        f"characters in float32, logits by up to {difference:.1e}"
    )


if __name__ == "__main__":
    main(stress)
