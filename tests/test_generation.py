"""Generation: cached text is uncached text at any length, each sample is its own, and the fast
decoder is GPT.forward.
"""

import dataclasses
import itertools
import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import KERNELS, LAYOUTS, ModelConfig
from model import fast_decode
from model.generate import Generation, Sampler, apply_top_p, generate, window_start
from model.gpt import GPT
from tests.campaigns.cached_text import campaign, flips
from tests.variants import CHOICES, in_layout

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8)
V = 11
FALL_BACK = Generation._fall_back  # which conftest.py replaces


def build(**changes):
    model = GPT(dataclasses.replace(SMALL, **changes), V, seed=1).double()
    with torch.no_grad():
        for parameter in model.parameters():  # an initial model hardly prefers anything
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.3
            )
    return model


def text(model, prompt, sampler, length, **options):
    steps = list(generate(model, prompt, sampler, length, **options))
    return torch.stack(steps, dim=1) if steps else prompt[:, :0]


def prompts(rows, length, seed=0):
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------- the window


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 64])
def test_the_window_is_a_function_of_the_length_alone_and_always_fits(block_size):
    hop = max(1, block_size // 2)
    for n in range(1, 5 * block_size + 2):
        start = window_start(n, block_size)
        assert start % hop == 0 and 0 < n - start <= block_size
        assert start == 0 if n <= block_size else n - (start - hop) > block_size
        assert window_start(n, block_size, "exact") == max(0, n - block_size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("window", ["stepped", "exact"])
def test_a_text_is_what_the_rule_says_written_out(temperature, window):
    model, prompt = build(), prompts(2, 3)
    expected, sampler = prompt, Sampler(5, range(2), temperature=temperature)
    sampler.advance(3)
    for n in range(3, 3 + 5 * SMALL.block_size):
        start = (
            window_start(n, SMALL.block_size)
            if window == "stepped"
            else max(0, n - SMALL.block_size)
        )
        with torch.no_grad():
            ids = sampler(model(expected[:, start:])[:, -1].numpy())
        expected = torch.cat([expected, torch.from_numpy(ids)[:, None]], dim=1)
    for cache in (True, False):
        found = text(
            model,
            prompt,
            Sampler(5, range(2), temperature=temperature),
            40,
            cache=cache,
            window=window,
        )
        assert torch.equal(found, expected[:, 3:])


def test_cached_text_is_uncached_text_in_random_cases():
    counts = campaign(cases=40)
    assert counts["cases"] == 40 and counts["characters"] > 1000
    assert counts["different"] == 0 and counts["largest difference"] < 1e-12


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cached_text_is_uncached_text_in_every_layout_and_kernel(layout, kernel):
    counts = campaign(cases=2, attention=layout, kernel=kernel)
    assert counts["different"] == 0 and counts["largest difference"] < 1e-12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_continued_from_itself_goes_on_as_if_it_had_never_stopped(temperature):
    model, prompt = build(positions="rope"), prompts(2, 5)
    whole = text(model, prompt, Sampler(5, range(2), temperature=temperature), 60)
    for cut in (1, 3, 11, 40):
        longer = torch.cat([prompt, whole[:, :cut]], dim=1)
        continued = text(model, longer, Sampler(5, range(2), temperature=temperature), 60 - cut)
        assert torch.equal(continued, whole[:, cut:])


def test_a_text_read_in_pieces_between_draws_is_the_same_as_one_read_whole():
    model, written = build(), np.empty((1, 0), np.int64)
    talk = Generation(model, Sampler(3))
    for length in (3, 1, 9, 2, 20):  # past the window too
        typed = prompts(1, length, seed=length).numpy()
        talk.append(typed)
        whole = Generation(model, Sampler(3), cache=False)
        whole.append(np.concatenate([written, typed], axis=1))
        said = np.stack([talk.step() for _ in range(4)], axis=1)
        assert np.array_equal(said, np.stack([whole.step() for _ in range(4)], axis=1))
        written = np.concatenate([written, typed, said], axis=1)


def test_nothing_grows_with_the_text():
    talk = Generation(build().float(), Sampler(3))
    talk.append(prompts(1, 100).numpy())
    for _ in range(100):
        talk.step()
        assert talk.ids.shape[1] <= SMALL.block_size
    assert talk.length == 200


def test_nothing_more_than_the_prompt_is_an_empty_text():
    assert text(build(), prompts(2, 3), Sampler(0, range(2)), 0).shape == (2, 0)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        next(generate(build(), prompts(1, 0), Sampler(), 1))


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


# --------------------------------------------------------------------------------- the fast decoder


@pytest.mark.parametrize("large", [0, 10**9], ids=["panels", "one piece"])
def test_the_fast_decoder_is_gpt_forward_in_every_variant(monkeypatch, large):
    monkeypatch.setattr(fast_decode, "LARGE", large)
    ids = prompts(1, 8)
    for values in itertools.product(*CHOICES.values()):
        variant = dict(zip(CHOICES, values, strict=True))
        model = build(**variant).eval()
        with torch.inference_mode():
            expected, model = model(ids)[0].numpy(), model.float()
            caches = model.new_caches()
            model(ids[:, :2], caches)
        step = fast_decode.FastDecoder(model)
        found = np.concatenate([step(ids[0, : i + 1].numpy(), caches) for i in range(2, 8)])
        np.testing.assert_allclose(found, expected[2:], rtol=1e-4, atol=2e-5, err_msg=str(variant))
        assert found.dtype == np.float32 and all(cache.length == 8 for cache in caches)


def test_a_text_checks_the_fast_decoder_in_every_variant():
    """At the first step after one character, and at the last position of the window.

    That it falls back would be an error (see conftest.py).
    """
    for values in itertools.product(*CHOICES.values()):
        model = build(**dict(zip(CHOICES, values, strict=True))).float()
        for prompt in (1, SMALL.block_size - 1):
            generation = Generation(model, Sampler(1))
            generation.append(prompts(1, prompt).numpy())
            generation.step()
            assert not generation.decoder_checked  # prefill is the model's
            generation.step()
            assert generation.decoder_checked


def test_a_decoder_that_differs_is_not_used_and_one_line_says_so(monkeypatch):
    def fall_back(self, difference, real=FALL_BACK):
        fallen.append(difference)
        real(self, difference)

    def broken(self, ids, caches, real=fast_decode.FastDecoder.__call__):
        return real(self, ids, caches) + 1e-3

    fallen, lines, model = [], [], build(block_size=8).float()
    expected = text(model, prompts(1, 2), Sampler(5), 20, cache=False)
    monkeypatch.setattr(Generation, "_fall_back", fall_back)
    monkeypatch.setattr(fast_decode.FastDecoder, "__call__", broken)
    generation = Generation(model, Sampler(5), notify=lines.append)
    generation.append(prompts(1, 2).numpy())
    found = [int(generation.step()[0]) for _ in range(20)]
    assert found == expected[0].tolist()
    assert generation.decoder is None and fallen == [pytest.approx(1e-3, rel=1e-2)]
    assert len(lines) == 1
    assert lines[0].startswith("the fast decoder's logits differ from the model's by 1.0e-03; ")


@pytest.mark.parametrize("difference", [1e-3, np.nan])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_tolerance_of_the_check_grows_with_the_logits(difference, scale, monkeypatch):
    def fail(self, found):
        raise ZeroDivisionError

    def off(self, ids, caches, real=fast_decode.FastDecoder.__call__):
        return real(self, ids, caches) + difference

    model = build(tied=False).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale / model(prompts(1, 3)).abs().max())
    monkeypatch.setattr(Generation, "_fall_back", fail)
    monkeypatch.setattr(fast_decode.FastDecoder, "__call__", off)
    generation = Generation(model, Sampler(1))
    generation.append(prompts(1, 2).numpy())
    generation.step()
    if scale == 100.0 and difference == 1e-3:
        generation.step()
    else:
        with pytest.raises(ZeroDivisionError):
            generation.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fast_decoder_takes_the_weights_from_any_layout(layout):
    model, logits = build(bias=True).float().eval(), []
    for each in (model, in_layout(model, layout)):
        caches = each.new_caches()
        with torch.no_grad():
            each(prompts(1, 2), caches)
        for cache in caches:  # of which other layouts may round differently
            cache.keys.fill_(0.5)
            cache.values.fill_(0.5)
        logits.append(fast_decode.FastDecoder(each)(prompts(1, 3)[0].numpy(), caches))
    assert np.array_equal(*logits)


def test_a_long_text_by_the_fast_decoder_is_the_one_by_gpt_forward():
    counts = flips(200)
    assert counts["different"] == 0 and counts["largest difference"] < 1e-4


def test_threads_are_used_where_they_help(monkeypatch):
    model = build().float()
    monkeypatch.setattr(fast_decode, "choose_threads", lambda calls: 2 * len(calls))
    assert fast_decode.FastDecoder(model).threads == 1
    monkeypatch.setattr(fast_decode, "LARGE", 0)
    assert fast_decode.FastDecoder(model).threads == 2 * 4 * model.config.n_layer


@pytest.mark.parametrize(
    "seconds, expected", [(lambda n: 0.01 / n, 3), (lambda n: n / 500, 1)], ids=["alone", "busy"]
)
def test_one_thread_is_taken_where_all_are_slower(seconds, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert (
            fast_decode.choose_threads([lambda: time.sleep(seconds(torch.get_num_threads()))] * 2)
            == expected
        )
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_gpt_forward_goes_on_from_what_the_fast_decoder_has_read():
    model, ids = build(positions="rope").float().eval(), prompts(1, 8)
    caches = model.new_caches()
    with torch.inference_mode():
        model(ids[:, :3], caches)
        step = fast_decode.FastDecoder(model)
        for i in (3, 4):
            step(ids[0, : i + 1].numpy(), caches)
        found = model(ids, caches)
        torch.testing.assert_close(found, model(ids)[:, 5:], rtol=1e-4, atol=1e-5)


def test_only_one_stream_in_float32_with_a_cache_goes_by_the_fast_decoder(monkeypatch):
    steps, step = [], fast_decode.FastDecoder.__call__
    monkeypatch.setattr(
        fast_decode.FastDecoder,
        "__call__",
        lambda self, *read: steps.append(read) or step(self, *read),
    )
    for model, rows, options, fast_steps in (
        (build().float(), 1, {}, 3),
        (build(), 1, {}, 0),
        (build().float(), 2, {}, 0),
        (build().float(), 1, {"cache": False}, 0),
        (build().bfloat16(), 1, {}, 0),
    ):
        steps.clear()
        text(model, prompts(rows, 2), Sampler(1, range(rows)), 4, **options)
        assert len(steps) == fast_steps


# -------------------------------------------------------------------------------------- the sampler


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
        for i in sorted(
            keep, key=lambda i: weights[i]
        ):  # from the least likely, as long as 1 - top_p is left out
            cumulative += weights[i] / total
            if cumulative <= 1 - top_p and i != best:
                dropped.add(i)
        keep -= dropped
    if min_p:
        keep = {i for i in keep if weights[i] >= min_p * weights[best]}
    total = sum(weights[i] for i in keep)
    return [weights[i] / total if i in keep else 0.0 for i in range(len(logits))]


def probabilities(sampler, logits):
    weights = sampler.unnormalized_probs(np.array(logits))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.9])
def test_filters_mean_what_the_written_out_ones_mean(top_k, top_p, min_p):
    logits = np.random.default_rng(4).normal(scale=3, size=(40, V))
    for temperature in (0.1, 0.8, 5.0):
        sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = [written_out(row, temperature, top_k, top_p, min_p) for row in logits.tolist()]
        np.testing.assert_allclose(probabilities(sampler, logits), expected, rtol=0, atol=1e-12)


LOGIT = st.sampled_from([-1e30, -100.0, -1.0, 0.0, 0.0, 1e-9, 1.0, 80.0, 1e30])


@given(
    st.lists(LOGIT, min_size=1, max_size=9),
    st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1e6]),
    st.integers(0, 10),
    st.sampled_from([1e-300, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 0.999999]),
)
@settings(max_examples=300, deadline=None)
def test_whatever_the_filters_there_is_a_choice_and_it_is_one_that_they_leave(
    row, temperature, top_k, top_p, min_p
):
    sampler = Sampler(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = np.array([row], np.float32)
    chosen = sampler(logits).item()
    if temperature < 1e-6:
        assert chosen == logits.argmax()
    else:
        assert (
            np.isfinite(sampler.unnormalized_probs(logits)).all()
            and sampler.unnormalized_probs(logits)[0, chosen] > 0
        )


def test_ties_at_the_kth_logit_are_all_kept():
    assert (
        Sampler(top_k=2).unnormalized_probs(np.array([[3.0, 1.0, 1.0, 1.0, 0.0]])) > 0
    ).tolist() == [[True] * 4 + [False]]


def test_temperature_zero_is_greedy():
    logits = np.random.default_rng(0).normal(size=(5, V))
    for temperature in (0.0, 1e-7):
        assert np.array_equal(
            Sampler(0, range(5), temperature=temperature)(logits), logits.argmax(-1)
        )


def test_draws_follow_the_distribution():
    logits = np.array([[0.0, 1.0, 2.0, -np.inf]])
    sampler = Sampler(7)
    counts = np.bincount([sampler(logits).item() for _ in range(4000)], minlength=4) / 4000
    assert counts[3] == 0
    np.testing.assert_allclose(counts, probabilities(sampler, logits)[0], atol=0.03)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_a_draw_is_always_of_a_character_that_is_left(number):
    class Stream:
        def random(self):
            return number

    sampler = Sampler()
    sampler.rngs = [Stream()]
    for seed in range(200):
        logits = np.random.default_rng(seed).normal(scale=10, size=(1, V))
        logits[0, [0, 1, -2, -1]] = -np.inf
        assert 2 <= sampler(logits).item() < V - 2


# ----------------------------------------------------------------- the examples of the docstrings


def test_the_examples_of_the_docstrings_are_right():
    table = re.search(r"n +((?:\d+ +)+\d+)\n +start +((?:\d+ +)+\d+)", window_start.__doc__)
    lengths, starts = ([int(n) for n in row.split()] for row in table.groups())
    assert [window_start(n, 8) for n in lengths] == starts and len(starts) == 10
    probs = np.array([[0.5, 0.125, 0.25, 0.125]])
    apply_top_p(probs, 0.7)
    assert probs.tolist() == [[0.5, 0, 0.25, 0]] and "[0.5, 0, 0.25, 0]" in apply_top_p.__doc__
