"""Ensembles: averages of probabilities, in generation, in scores and on the command line."""

import dataclasses

import numpy as np
import pytest
import torch

import sample
from checkpointing import checkpoint
from common.errors import UserError, escape
from common.files import write_atomic
from configs.schema import Config, ModelConfig
from data.batches import Split, evaluation_windows
from model import ensemble, fast_decode
from model.ensemble import Ensemble
from model.generate import Generation, Sampler, window_start
from model.gpt import GPT
from tests.variants import concatenated
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


# --------------------------------------------------------------------------------------- sample.py


@pytest.fixture(scope="session")
def other_checkpoint(smoke, tmp_path_factory):
    """Return a function that writes a random model of the smoke run's vocabulary, or of another."""
    saved = checkpoint.load(smoke / "best.safetensors")

    def write(name, vocabulary=saved.vocabulary, **changes):
        path = tmp_path_factory.mktemp("others") / f"{name}.safetensors"
        config = dataclasses.replace(SMALL, **{"block_size": 64} | changes)
        model = random_weights(GPT(config, len(vocabulary)), 3)
        tensors = {f"model.{key}": each for key, each in concatenated(model.named_slices()).items()}
        config = dataclasses.replace(Config(), model=config)
        changed = {"config": config, "vocabulary": vocabulary, "tensors": tensors}
        write_atomic(path, checkpoint.to_bytes(dataclasses.replace(saved, **changed)))
        return path

    return write


def load_model(path):
    return checkpoint.build_model(checkpoint.load(path)).eval()


def test_several_checkpoints_generate_from_their_averaged_probabilities(
    smoke, other_checkpoint, capsys
):
    other = other_checkpoint("other", n_layer=3)
    command = [f"--ckpt={smoke}", f"--ckpt={other}", "--prompt=So ", "--max-new-tokens=100"]
    for options, settings in (
        (["--temperature=0"], {"temperature": 0.0}),
        (["--top-k=3", "--top-p=0.9", "--min-p=0.1", "--seed=5"], None),
    ):
        settings = settings or {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
        tokenizer = sample.Session(sample.load_sample(command)).tokenizer
        models = [load_model(smoke / "best.safetensors"), load_model(other)]
        prompt, sampler = tokenizer.encode("So ")[None].astype(np.int64), Sampler(5, **settings)
        result = generate(Ensemble(models), prompt, sampler, 100, cache=False)
        expected = f"So {tokenizer.decode(result[0])}\n"
        for more in ([], ["--no-cache"]):
            assert sample.main([*command, *options, *more]) == 0
            assert capsys.readouterr().out == expected
        assert sample.main([*command, *options, "--num-samples=3"]) == 0
        assert expected in capsys.readouterr().out


def test_a_stop_string_and_the_window_work_with_several_checkpoints(
    smoke, other_checkpoint, capsys
):
    command = [f"--ckpt={smoke}", f"--ckpt={other_checkpoint('other')}", "--max-new-tokens=150"]
    texts = []
    for options in ([], ["--window=exact"], ["--window=exact", "--no-cache"]):
        assert sample.main([*command, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0][:64] == texts[1][:64] and texts[0] != texts[1] == texts[2]
    stop = texts[0][20:22]
    assert sample.main([*command, f"--stop={stop}"]) == 0
    assert capsys.readouterr().out == texts[0][: texts[0].index(stop)] + "\n"


def test_a_score_with_several_checkpoints_is_that_of_the_averaged_probabilities(
    smoke, other_checkpoint, tmp_path, capsys
):
    text, other = "So it is, and so it was.\n" * 20, other_checkpoint("other")
    (tmp_path / "text.txt").write_text(text)
    models = [load_model(smoke / "best.safetensors"), load_model(other)]
    command = [f"--ckpt={smoke}", f"--ckpt={other}", f"--score={tmp_path / 'text.txt'}"]
    assert sample.main(command) == 0
    printed = capsys.readouterr().out
    tokenizer = sample.Session(sample.load_sample(command)).tokenizer
    ids = tokenizer.encode(text).astype(np.int64)
    probs = np.concatenate(
        [
            mean_probabilities(models, ids[None, i : i + 64][:, : len(ids) - 1 - i])[0]
            for i in range(0, len(ids) - 1, 64)
        ]
    )
    nats = -np.log(probs[np.arange(len(ids) - 1), ids[1:]]).mean()
    assert printed.startswith(f"{nats:.4f} nats, ")


def test_one_checkpoint_is_used_as_it_is(smoke):
    assert type(sample.Session(sample.load_sample([f"--ckpt={smoke}"])).model) is GPT


@pytest.mark.parametrize(
    "vocabulary, block_size, difference",
    [
        (lambda known: known[1:], 64, "vocabulary differs from {first}'s: without '\\n' (U+000A);"),
        (
            lambda known: known + "\xe9",
            64,
            "vocabulary differs from {first}'s: with '\xe9' (U+00E9);",
        ),
        (
            lambda known: known[1:] + "\xe9",
            64,
            "vocabulary differs from {first}'s: without '\\n' (U+000A), with '\xe9' (U+00E9);",
        ),
        (lambda known: known, 32, "block_size is 32, {first}'s is 64;"),
    ],
    ids=["fewer characters", "more characters", "other characters", "block_size"],
)
def test_models_that_cannot_be_averaged_are_refused_with_the_difference(
    smoke, other_checkpoint, vocabulary, block_size, difference
):
    first = smoke / "best.safetensors"
    known = checkpoint.load(first).vocabulary
    other = other_checkpoint("other", vocabulary(known), block_size=block_size)
    with pytest.raises(UserError) as caught:
        sample.main([f"--ckpt={smoke}", f"--ckpt={other}"])
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert message.startswith(f"{other}: its {difference.format(first=first)}"), message
    assert escape(message) == message


@pytest.mark.parametrize("option", ["--html=page.html", "--attention=heads", "--kernel=loop"])
def test_options_for_one_model_are_refused_with_several_checkpoints(option):
    with pytest.raises(UserError, match="takes one --ckpt, but 2 are given") as caught:
        sample.main(["--ckpt=x", "--ckpt=y", option])
    assert caught.value.exit_code == 2
