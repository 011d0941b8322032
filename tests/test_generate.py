"""Generation: equality of cached and uncached text, independence of samples, sampling filters.

CASES=1000 python -m pytest tests/test_generate.py    # a campaign of cached texts
"""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import KERNELS, LAYOUTS
from model.generate import Generation, Sampler, generate, window_start
from tests.variants import CHOICES, random_model

V = 11
MODELS = CHOICES | {
    "layout": LAYOUTS, "kernel": KERNELS, "n_layer": (1, 2),
    "block_size": (1, 2, 3, 5, 8, 16), "n_head": (1, 2, 3), "n_embd": (12, 24),
}  # fmt: skip
SAMPLING = {
    "temperature": (0.0, 0.5, 1.0, 2.0), "top_k": (0, 3), "top_p": (1.0, 0.8), "min_p": (0.0, 0.1),
}  # fmt: skip


def generate_ids(model, prompt, sampler, length):
    return torch.stack(list(generate(model, prompt, sampler, length)), dim=1)


def prompts(rows, length, seed=0):
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------- the window


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 64])
def test_window_start(block_size):
    """It depends only on the length, and the window is never longer than block_size."""
    hop = max(1, block_size // 2)
    for n in range(1, 5 * block_size + 2):
        start = window_start(n, block_size)
        assert start % hop == 0 and 0 < n - start <= block_size
        assert start == 0 if n <= block_size else n - (start - hop) > block_size


def test_generate_equals_a_plain_loop():
    model, prompt = random_model().double(), prompts(2, 3)
    expected, sampler = prompt, Sampler(5, range(2))
    sampler.advance(3)
    for n in range(3, 43):  # five contexts
        with torch.no_grad():
            logits = model(expected[:, window_start(n, 8) :])[:, -1]
        ids = torch.from_numpy(sampler(logits.numpy()))
        expected = torch.cat([expected, ids[:, None]], dim=1)
    assert torch.equal(generate_ids(model, prompt, Sampler(5, range(2)), 40), expected[:, 3:])


class RecordingSampler(Sampler):
    """A sampler that stores the last logits."""

    def __call__(self, logits):
        self.logits = logits.copy()
        return super().__call__(logits)


@pytest.mark.parametrize("number", range(int(os.environ.get("CASES", "15"))))
def test_cached_text_equals_uncached(number):
    """A random model, prompt, batch and sampler: texts of up to ten windows."""
    draw = random.Random(number)
    chosen, sampling = (
        {name: draw.choice(values) for name, values in each.items()} for each in (MODELS, SAMPLING)
    )
    size = chosen["block_size"]
    model = random_model(number, **chosen).double()
    prompt = prompts(1, draw.randint(1, 3 * size)).repeat(draw.choice([1, 2, 5]), 1).numpy()
    texts = [
        Generation(model, RecordingSampler(number, range(len(prompt)), **sampling), cache=cache)
        for cache in (True, False)
    ]
    for text in texts:
        text.append(prompt)
    for _ in range(draw.randint(1, 10 * size)):
        assert np.array_equal(texts[0].draw(), texts[1].draw())
        difference = texts[0].sampler.logits - texts[1].sampler.logits
        assert np.abs(difference).max() < 1e-11


def test_sample_alone_or_in_a_batch():
    """It depends on the seed and its number, not on the others."""
    model, prompt = random_model().double(), prompts(1, 4)
    batch = generate_ids(model, prompt.expand(64, -1), Sampler(9, range(64)), 40)
    for i in (0, 17, 63):
        assert torch.equal(generate_ids(model, prompt, Sampler(9, [i]), 40)[0], batch[i])
    texts = set(map(tuple, batch.tolist()))
    (other,) = generate_ids(model, prompt, Sampler(10, [0]), 40).tolist()
    assert len(texts) > 60 and tuple(other) not in texts


# -------------------------------------------------------------------------------------- the sampler


def reference_probabilities(logits, temperature, top_k, top_p, min_p):
    """Compute the probabilities after all filters for one row, step by step on Python floats."""
    logits = [(value - max(logits)) / temperature for value in logits]
    remaining = set(range(len(logits)))
    if top_k > 0:
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        remaining = {i for i in remaining if logits[i] >= kth}
    weights = {i: np.exp(logits[i]) for i in remaining}
    if top_p < 1:
        dropped = 0.0
        # from the least likely, drop characters while at most 1 - top_p is dropped; one stays
        for i in sorted(remaining, key=lambda i: (weights[i], i))[:-1]:
            dropped += weights[i] / sum(weights.values())
            if dropped <= 1 - top_p:
                remaining.remove(i)
    remaining = {i for i in remaining if weights[i] >= min_p}  # the largest is 1
    total = sum(weights[i] for i in remaining)
    return [weights[i] / total if i in remaining else 0.0 for i in range(len(logits))]


def probabilities(sampler, logits):
    weights = sampler.unnormalized_probs(np.array(logits))
    return weights / weights.sum(axis=-1, keepdims=True)


LOGIT = st.floats(-5, 5) | st.sampled_from([-1e30, 0.0, 80.0, 1e30])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(LOGIT, min_size=1, max_size=9),
    st.sampled_from([1e-6, 1.0, 5.0, 1e6]),
    st.sampled_from([0, 1, 3, 10]),
    st.sampled_from([1e-300, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filters_equal_reference(row, temperature, top_k, top_p, min_p):
    """And leave a character."""
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = reference_probabilities(row, **filters)
    sampler = Sampler(1, **filters)
    np.testing.assert_allclose(probabilities(sampler, [row])[0], expected, rtol=0, atol=1e-12)
    assert expected[sampler(np.array([row])).item()] > 0


def test_filters_keep_ties_at_top_k():
    probs = Sampler(top_k=2).unnormalized_probs(np.array([[3.0, 1.0, 1.0, 1.0, 0.0]]))
    assert (probs > 0).tolist() == [[True] * 4 + [False]]


@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_sampler_at_temperature_0_is_greedy(temperature):
    logits = np.array([[0.5, 0.1, 0.6], [1e30, -1e30, 0.0]])
    assert Sampler(1, range(2), temperature=temperature)(logits).tolist() == [2, 0]


def test_sampler_frequencies():
    logits = np.array([[0.0, 1.0, 2.0, -np.inf]])
    sampler = Sampler(7)
    counts = np.bincount([sampler(logits).item() for _ in range(4000)], minlength=4) / 4000
    assert counts[3] == 0
    np.testing.assert_allclose(counts, probabilities(sampler, logits)[0], atol=0.03)
