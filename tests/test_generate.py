"""Generation: equality of cached and uncached text, sampling filters.

CASES=1000 python -m pytest tests/test_generate.py    # a campaign of cached texts
"""

import math
import os
import random

import numpy as np
import pytest

from configs.schema import KERNELS, LAYOUTS
from model.generate import Generation, Sampler, last_logits, window_start
from tests.variants import CHOICES, random_model

MODELS = CHOICES | {
    "layout": LAYOUTS, "kernel": KERNELS, "n_layer": (1, 2),
    "block_size": (1, 2, 3, 5, 8), "n_head": (1, 2, 3), "n_embd": (12, 24),
}  # fmt: skip
SAMPLING = {"temperature": (0, 0.5, 2), "top_k": (0, 3), "top_p": (1.0, 0.8), "min_p": (0.0, 0.1)}


def test_window_start():
    """When the context is full, its older half is dropped."""
    assert [window_start(n, 8) for n in range(7, 18)] == [0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12]
    assert [window_start(n, 3) for n in range(2, 6)] == [0, 0, 1, 2]
    assert [window_start(n, 1) for n in range(1, 4)] == [0, 1, 2]


@pytest.mark.parametrize("number", range(int(os.environ.get("CASES", "12"))))
def test_cached_text_equals_uncached(number):
    """A random model, prompt, batch and sampler; the text is several windows long."""
    draw = random.Random(number)
    chosen = {name: draw.choice(values) for name, values in MODELS.items()}
    sampling = {name: draw.choice(values) for name, values in SAMPLING.items()}
    model, size = random_model(number, **chosen).double(), chosen["block_size"]
    rows, length = draw.choice([1, 2, 5]), draw.randint(1, 3 * size)
    prompt = np.array([draw.choices(range(11), k=length)] * rows)
    cached = Generation(model, Sampler(number, range(rows), **sampling))
    cached.append(prompt)
    text, sampler = prompt, Sampler(number, range(rows), **sampling)
    sampler.advance(length)
    for n in range(length, length + 8 * size):
        ids = sampler(last_logits(model, text[:, window_start(n, size) :]))
        assert np.array_equal(cached.draw(), ids)
        text = np.concatenate([text, ids[:, None]], axis=1)


# -------------------------------------------------------------------------------------- the sampler


def reference_probabilities(logits, temperature, top_k, top_p, min_p):
    """Compute the probabilities after all filters for one row, step by step on Python floats."""
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    if top_k > 0:
        kth = sorted(weights)[-top_k:][0]
        weights = [weight if weight >= kth else 0.0 for weight in weights]
    if top_p < 1:
        total, dropped = sum(weights), 0.0
        # from the least likely, drop characters while at most 1 - top_p is dropped; one stays
        for i in sorted(range(len(weights)), key=weights.__getitem__)[:-1]:
            dropped += weights[i] / total
            if dropped <= 1 - top_p:
                weights[i] = 0.0
    weights = [weight if weight >= min_p else 0.0 for weight in weights]  # the largest is 1
    return [weight / sum(weights) for weight in weights]


LOGITS = (-1e30, -5.0, -1.2, -0.3, 0.0, 0.4, 2.0, 5.0, 80.0, 1e30)
FILTERS = {
    "temperature": (1e-6, 1.0, 5.0, 1e6), "top_k": (0, 1, 3, 10),
    "top_p": (1e-300, 0.3, 0.9, 1.0), "min_p": (0.0, 0.05, 0.5),
}  # fmt: skip


def test_filters_equal_reference():
    """With ties, and the likeliest character stays."""
    draw = random.Random(1)
    for _ in range(1000):
        row = draw.choices(LOGITS, k=draw.randint(1, 9))
        filters = {name: draw.choice(values) for name, values in FILTERS.items()}
        expected, sampler = reference_probabilities(row, **filters), Sampler(1, **filters)
        weights = sampler.unnormalized_probs(np.array([row]))[0]
        np.testing.assert_allclose(weights / weights.sum(), expected, rtol=0, atol=1e-12)
        assert expected[sampler(np.array([row])).item()] > 0


def test_sampler_at_temperature_0_is_greedy():
    logits = np.array([[0.5, 0.1, 0.6], [1e30, -1e30, 0.0]])
    assert Sampler(1, range(2), temperature=0.0)(logits).tolist() == [2, 0]


def test_sampler_frequencies():
    sampler, logits = Sampler(7), np.array([[-np.inf, 0.0, np.log(2), 0.0]])
    counts = np.bincount([sampler(logits).item() for _ in range(4000)], minlength=4)
    assert counts[0] == 0
    np.testing.assert_allclose(counts / 4000, [0, 0.25, 0.5, 0.25], atol=0.03)
