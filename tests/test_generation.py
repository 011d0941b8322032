"""Generation: cached text is uncached text at any length, and each sample is its own."""

import dataclasses

import numpy as np
import pytest
import torch

from configs.schema import ModelConfig
from model.generate import Sampler, generate, window_start
from model.gpt import GPT

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8)
V = 11


def build(**changes):
    model = GPT(dataclasses.replace(SMALL, **changes), V, seed=1).double()
    with torch.no_grad():
        for parameter in model.parameters():  # an initial model hardly prefers anything
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.3)
    return model


def text(model, prompt, sampler, length, **options):
    steps = list(generate(model, prompt, sampler, length, **options))
    return torch.stack(steps, dim=1) if steps else prompt[:, :0]


def prompts(rows, length, seed=0):
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 64])
def test_the_window_is_a_function_of_the_length_alone_and_always_fits(block_size):
    hop = max(1, block_size // 2)
    for n in range(1, 5 * block_size + 2):
        start = window_start(n, block_size)
        assert start % hop == 0 and 0 < n - start <= block_size
        assert start == 0 if n <= block_size else n - (start - hop) > block_size


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("rows", [1, 3])
def test_cached_text_is_uncached_text_far_past_the_context(positions, temperature, length, rows):
    model, prompt = build(positions=positions), prompts(rows, length)
    cached, uncached = (
        text(model, prompt, Sampler(5, range(rows), temperature=temperature), 80, cache=cache)
        for cache in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert cached.shape == (rows, 80)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_continued_from_itself_goes_on_as_if_it_had_never_stopped(temperature):
    model, prompt = build(positions="rope"), prompts(2, 5)
    whole = text(model, prompt, Sampler(5, range(2), temperature=temperature), 60)
    for cut in (1, 3, 11, 40):
        longer = torch.cat([prompt, whole[:, :cut]], dim=1)
        assert torch.equal(
            text(model, longer, Sampler(5, range(2), temperature=temperature), 60 - cut), whole[:, cut:]
        )


def test_a_sample_is_the_same_alone_and_among_others():
    model, prompt = build(), prompts(1, 4)
    together = text(model, prompt.expand(64, -1), Sampler(9, range(64)), 40)
    for i in (0, 17, 63):
        assert torch.equal(text(model, prompt, Sampler(9, [i]), 40)[0], together[i])
    assert len({tuple(row) for row in together.tolist()}) > 60
    assert not torch.equal(text(model, prompt, Sampler(10, [0]), 40)[0], together[0])


def test_one_generation_leaves_no_trace_in_the_next():
    model = build()
    alone = text(model, prompts(1, 4), Sampler(3), 20)
    text(model, prompts(2, 6, seed=8), Sampler(4, range(2)), 33)
    assert torch.equal(text(model, prompts(1, 4), Sampler(3), 20), alone)


def test_nothing_more_than_the_prompt_is_an_empty_text():
    assert text(build(), prompts(2, 3), Sampler(0, range(2)), 0).shape == (2, 0)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        next(generate(build(), prompts(1, 0), Sampler(), 1))


def written_out(logits, temperature, top_k, top_p, min_p):
    """The filters by the book, one row, on Python floats."""
    logits = [value / temperature for value in logits]
    keep = set(range(len(logits)))
    if top_k:
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        keep = {i for i in keep if logits[i] >= kth}
    weights = {i: np.exp(logits[i] - max(logits)) for i in keep}
    total = sum(weights.values())
    best = max(keep, key=lambda i: weights[i])
    if top_p < 1:
        cumulative, dropped = 0.0, set()
        for i in sorted(keep, key=lambda i: weights[i]):  # from the least likely, as long as 1 - top_p is left out
            cumulative += weights[i] / total
            if cumulative <= 1 - top_p and i != best:
                dropped.add(i)
        keep -= dropped
    if min_p:
        keep = {i for i in keep if weights[i] >= min_p * weights[best]}
    total = sum(weights[i] for i in keep)
    return [weights[i] / total if i in keep else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.9])
def test_filters_mean_what_the_written_out_ones_mean(top_k, top_p, min_p):
    logits = torch.randn(40, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 3
    for temperature in (0.1, 0.8, 5.0):
        sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = [written_out(row, temperature, top_k, top_p, min_p) for row in logits.tolist()]
        assert torch.allclose(sampler.probabilities(logits), torch.tensor(expected), rtol=0, atol=1e-12)


def test_ties_at_the_kth_logit_are_all_kept():
    kept = Sampler(top_k=2).probabilities(torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])) > 0
    assert kept.tolist() == [[True, True, True, True, False]]


def test_temperature_zero_is_greedy():
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1e-7):
        assert torch.equal(Sampler(0, range(5), temperature=temperature)(logits), logits.argmax(-1))


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    sampler = Sampler(7)
    counts = torch.bincount(torch.cat([sampler(logits) for _ in range(4000)]), minlength=4) / 4000
    assert counts[3] == 0
    assert torch.allclose(counts.double(), logits[0].double().softmax(0), atol=0.03)


def test_a_draw_never_leaves_the_vocabulary():
    class Last:
        def random(self):
            return 1 - 2**-53

    sampler = Sampler()
    sampler.streams = [Last()]
    for seed in range(200):
        logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 10
        logits[0, -2:] = -torch.inf
        assert sampler(logits).item() < V - 2
