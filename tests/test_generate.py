"""Generation: equality of cached and uncached text, independence of samples, sampling filters."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import ModelConfig
from model.generate import Sampler, Texts, generate, window_start
from model.gpt import GPT
from tests.stress.cached_text import stress
from tests.variants import noisy

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, logit_scale=0.8)
V = 11


def build(**changes):
    return noisy(GPT(dataclasses.replace(SMALL, **changes), V, seed=1)).double()


def generate_ids(model, prompt, sampler, length):
    return torch.stack(list(generate(model, prompt, sampler, length)), dim=1)


def prompts(rows, length, seed=0):
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------- the window


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 64])
def test_the_window_depends_only_on_the_length_and_never_exceeds_block_size(block_size):
    hop = max(1, block_size // 2)
    for n in range(1, 5 * block_size + 2):
        start = window_start(n, block_size)
        assert start % hop == 0 and 0 < n - start <= block_size
        assert start == 0 if n <= block_size else n - (start - hop) > block_size


def test_generated_text_equals_a_plain_loop_over_gpt_forward():
    model, prompt = build().eval(), prompts(2, 3)
    expected, sampler = prompt, Sampler(5, range(2))
    sampler.advance(3)
    for n in range(3, 3 + 5 * SMALL.block_size):
        start = window_start(n, SMALL.block_size)
        with torch.no_grad():
            ids = sampler(model(expected[:, start:])[:, -1].numpy())
        expected = torch.cat([expected, torch.from_numpy(ids)[:, None]], dim=1)
    assert torch.equal(generate_ids(model, prompt, Sampler(5, range(2)), 40), expected[:, 3:])


def test_cached_text_equals_uncached_text_beyond_the_context():
    assert "0 differ from uncached ones" in stress(full=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_appending_text_between_characters_equals_one_prefill_of_the_whole_text(dtype):
    model, context = build().to(dtype), np.empty((1, 0), np.int64)
    texts = Texts(model, Sampler(3))
    for length in (3, 1, 9, 2, 20):  # past the window too
        appended = prompts(1, length, seed=length).numpy()
        texts.append(appended)
        whole = Texts(model, Sampler(3), cache=False)
        whole.append(np.concatenate([context, appended], axis=1))
        written = np.stack([texts.write_one() for _ in range(4)], axis=1)
        assert np.array_equal(written, np.stack([whole.write_one() for _ in range(4)], axis=1))
        context = np.concatenate([context, appended, written], axis=1)


def test_a_sample_depends_on_the_seed_and_its_number_and_not_on_the_others_of_its_batch():
    model, prompt = build(), prompts(1, 4)
    batch = generate_ids(model, prompt.expand(64, -1), Sampler(9, range(64)), 40)
    for i in (0, 17, 63):
        assert torch.equal(generate_ids(model, prompt, Sampler(9, [i]), 40)[0], batch[i])
    assert not torch.equal(generate_ids(model, prompt, Sampler(10, [0]), 40)[0], batch[1])
    assert len({tuple(row) for row in batch.tolist()}) > 60


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
def test_filters_equal_their_step_by_step_reference_and_leave_a_character(
    row, temperature, top_k, top_p, min_p
):
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = reference_probabilities(row, **filters)
    sampler = Sampler(1, **filters)
    np.testing.assert_allclose(probabilities(sampler, [row])[0], expected, rtol=0, atol=1e-12)
    assert expected[sampler(np.array([row])).item()] > 0


@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_temperature_zero_is_greedy(temperature):
    logits = np.array([[0.5, 0.1, 0.6], [1e30, -1e30, 0.0]])
    assert Sampler(1, range(2), temperature=temperature)(logits).tolist() == [2, 0]


def test_top_k_includes_all_ties_at_the_kth_logit():
    probs = Sampler(top_k=2).unnormalized_probs(np.array([[3.0, 1.0, 1.0, 1.0, 0.0]]))
    assert (probs > 0).tolist() == [[True] * 4 + [False]]


def test_sampled_frequencies_follow_the_distribution():
    logits = np.array([[0.0, 1.0, 2.0, -np.inf]])
    sampler = Sampler(7)
    counts = np.bincount([sampler(logits).item() for _ in range(4000)], minlength=4) / 4000
    assert counts[3] == 0
    np.testing.assert_allclose(counts, probabilities(sampler, logits)[0], atol=0.03)
