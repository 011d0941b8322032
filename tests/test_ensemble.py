"""Ensembles: averages of probabilities, in generation and in scores."""

import dataclasses

import numpy as np
import pytest
import torch

from configs.schema import ModelConfig
from data.batches import Split, evaluation_windows
from model import ensemble, fast_decode
from model.ensemble import Ensemble
from model.generate import Generation, Sampler, window_start
from model.gpt import GPT
from training.evaluate import exact_loss
from training.runtime import select_runtime

V = 11
SMALL = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)
FILTERS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.8},
    {"min_p": 0.2},
]


def random_weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # the initial predictions are almost uniform
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    return model


def members():
    """Return three models that have only vocabulary and block_size in common."""
    changes = [
        {},
        {"n_layer": 2, "n_embd": 24, "attention": "heads", "kernel": "loop", "mlp": "swiglu"},
        {"positions": "rope", "token_shifts": 2, "tied": False, "logit_softcap": 15.0},
    ]
    models = [GPT(dataclasses.replace(SMALL, **each), V) for each in changes]
    return [random_weights(model, seed).double().eval() for seed, model in enumerate(models)]


def ids_of(rows, length):
    return np.random.default_rng(4).integers(0, V, (rows, length))


def mean_probabilities(models, ids):
    """Average the probabilities of what follows each of ids (B, T), step by step: (B, T, V)."""
    with torch.no_grad():
        logits = [model(torch.from_numpy(ids)) for model in models]
    return sum(each.softmax(-1) for each in logits) / len(models)


def plain_loop(models, prompt, sampler, length, window="stepped"):
    """Generate text by averaging the probabilities of GPT.forward: ids (B, length)."""
    ids = prompt
    sampler.advance(prompt.shape[1])
    for n in range(prompt.shape[1], prompt.shape[1] + length):
        probs = mean_probabilities(models, ids[:, window_start(n, SMALL.block_size, window) :])
        ids = np.column_stack([ids, sampler(probs[:, -1].log().numpy())])
    return ids[:, prompt.shape[1] :]


def generate(model, prompt, sampler, length, **options):
    generation = Generation(model, sampler, **options)
    generation.append(prompt)
    return np.stack([generation.step() for _ in range(length)], axis=1)


# ---------------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_mixture_sums_to_1_at_every_position_and_is_the_mean_of_the_probabilities(dtype, error):
    models, ids = members(), ids_of(3, 8)
    expected = mean_probabilities(models, ids)
    with torch.no_grad():
        probs = Ensemble(models).to(dtype)(torch.from_numpy(ids)).exp().double()
    assert probs.shape == (3, 8, V)
    assert (probs.sum(-1) - 1).abs().max() < error
    assert (probs - expected).abs().max() < error
    assert all((probs - each).abs().max() > 0.1 for each in map(softmax_of(ids), models))


def softmax_of(ids):
    return lambda model: model(torch.from_numpy(ids)).detach().double().softmax(-1)


def test_the_mixture_of_bfloat16_models_is_computed_in_float32():
    with torch.no_grad():
        log_probs = Ensemble(members()).bfloat16()(torch.from_numpy(ids_of(2, 8)))
    assert log_probs.dtype == torch.float32
    assert (log_probs.exp().sum(-1) - 1).abs().max() < 1e-6


def test_an_impossible_character_of_one_model_stays_possible():
    logits = torch.tensor([[[0.0, 0.0]], [[0.0, -1e30]]])
    assert ensemble.log_mean_probs(logits).exp().tolist() == [[0.75, 0.25]]


# ------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_generated_text_equals_a_plain_loop_over_averaged_probabilities(rows, settings):
    models, prompt = members(), ids_of(rows, 3)
    expected = plain_loop(models, prompt, Sampler(5, range(rows), **settings), 40)
    for cache in (True, False):
        again = Sampler(5, range(rows), **settings)
        assert np.array_equal(generate(Ensemble(models), prompt, again, 40, cache=cache), expected)


def test_generated_text_with_the_exact_window_equals_a_plain_loop():
    models, prompt = members(), ids_of(2, 3)
    expected = plain_loop(models, prompt, Sampler(5, range(2)), 20, "exact")
    result = generate(Ensemble(models), prompt, Sampler(5, range(2)), 20, window="exact")
    assert np.array_equal(result, expected)


def test_the_fast_decoder_averages_the_same_probabilities(monkeypatch):
    steps, step = [], fast_decode.FastDecoder.__call__
    monkeypatch.setattr(
        fast_decode.FastDecoder,
        "__call__",
        lambda self, *arguments: steps.append(self) or step(self, *arguments),
    )
    models, prompt = [model.float() for model in members()], ids_of(1, 2)
    expected = plain_loop(models, prompt, Sampler(5), 40)
    assert not steps
    generation = Generation(Ensemble(models), Sampler(5))  # conftest.py: a fall-back is an error
    generation.append(prompt)
    result = [generation.step()[0] for _ in range(40)]
    assert result == expected[0].tolist() and generation.decoder_checked
    assert len(set(steps)) == 3 and len(steps) % 3 == 0 and len(steps) > 3 * 20


def test_each_model_has_caches_of_its_own():
    models = members()
    caches = Ensemble(models).new_caches()
    assert len(set(map(id, caches))) == sum(model.config.n_layer for model in models) == 4
    ids = torch.from_numpy(ids_of(2, 6))
    with torch.no_grad():
        whole = Ensemble(models)(ids)
        parts = [Ensemble(models)(ids[:, :end], caches) for end in (2, 3, 6)]
    assert all(cache.length == 6 for cache in caches)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------- scores


def test_the_exact_loss_is_that_of_the_averaged_probabilities():
    models, ids = members(), ids_of(1, 50)[0].astype(np.uint8)
    windows = list(evaluation_windows(Split(ids, ((0, 50),)), 8, 4))
    nats = [
        -mean_probabilities(models, x).log().gather(-1, torch.from_numpy(y)[..., None]).flatten()
        for x, y in windows
    ]
    assert sum(map(len, nats)) == 49
    loss = exact_loss(Ensemble(models), windows, select_runtime("cpu", "float32"))
    assert loss == pytest.approx(torch.cat(nats).mean().item(), abs=1e-6)
    alone = [exact_loss(model, windows, select_runtime("cpu", "float32")) for model in models]
    assert loss < np.mean(alone) - 0.1  # the logarithm is concave
