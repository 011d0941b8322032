"""Mixtures of GPTs and an n-gram model: probabilities, generated text, scores, and sample.py."""

import dataclasses

import numpy as np
import pytest
import torch

import sample
from checkpointing import checkpoint
from common.errors import UserError
from common.files import write_atomic
from configs.cli import parse_sample_options
from configs.schema import Config, DataConfig, ModelConfig
from data.tokenizer import UNK, CharTokenizer
from model.fast_decode import FastDecoder
from model.generate import Generation, Sampler, window_start
from model.gpt import GPT
from model.mixture import NGRAM_ORDER, Mixture, MixtureDecoder
from model.ngram_model import NgramModel
from tests.commands import sample_main
from tests.conftest import ROOT
from tests.conftest import printed as printed_error
from tests.variants import checkpoint_of, noisy

V = 11
SMALL = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)
PLAY = ROOT / "data" / "plays" / "admiral.txt"  # the text whose n-grams are counted
KINDS = ["three GPTs", "three GPTs with n-grams"]


def ids_of(rows, length, seed=4):
    return np.random.default_rng(seed).integers(0, V, (rows, length))


def mixture_of(kind, dtype=torch.float64):
    """Build a mixture of GPTs that have only vocabulary and block_size in common."""
    changes = [
        {},
        {"n_layer": 2, "n_embd": 24, "attention": "heads", "kernel": "loop", "mlp": "swiglu"},
        {"positions": "rope", "token_shifts": 2, "ngram_embeddings": 4, "tied": False},
    ]
    gpts = [
        noisy(GPT(dataclasses.replace(SMALL, **each), V), 0.5, seed).to(dtype).eval()
        for seed, each in enumerate(changes)
    ]
    if kind == "three GPTs":
        return Mixture(gpts)
    return Mixture(gpts, NgramModel(ids_of(1, 400, 5)[0], 4, V), ngram_weight=0.4)


def plain_probs(mixture, ids):
    """Average the probabilities of what follows each of ids (B, T), in plain words: (B, T, V)."""
    with torch.no_grad():
        probs = [gpt(torch.from_numpy(ids)).double().softmax(-1).numpy() for gpt in mixture.gpts]
    mean = sum(probs) / len(probs)
    if mixture.ngram_model is None:
        return mean
    return 0.6 * mean + 0.4 * mixture.ngram_model.probs(ids, ids.shape[1]).astype(np.float64)


def plain_loop(mixture, prompt, sampler, length, window):
    """Generate text from `plain_probs` of the window at each character: ids (B, length)."""
    ids = prompt
    sampler.advance(prompt.shape[1])
    for n in range(prompt.shape[1], prompt.shape[1] + length):
        probs = plain_probs(mixture, ids[:, window_start(n, SMALL.block_size, window) :])
        ids = np.column_stack([ids, sampler(np.log(probs[:, -1]))])
    return ids[:, prompt.shape[1] :]


def generate(model, prompt, sampler, length, **options):
    generation = Generation(model, sampler, **options)
    generation.append(prompt)
    return np.stack([generation.step() for _ in range(length)], axis=1)


# ---------------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-7), (torch.float32, 1e-6)])
def test_a_mixture_is_the_weighted_mean_of_the_probabilities_at_every_position(kind, dtype, error):
    mixture, ids = mixture_of(kind, dtype), ids_of(3, 8)
    with torch.no_grad():
        probs = mixture(torch.from_numpy(ids)).exp().double().numpy()
        alone = [gpt(torch.from_numpy(ids)).double().softmax(-1).numpy() for gpt in mixture.gpts]
    assert probs.shape == (3, 8, V)
    assert np.abs(probs.sum(-1) - 1).max() < error
    assert np.abs(probs - plain_probs(mixture, ids)).max() < error
    assert all(np.abs(probs - each).max() > 0.1 for each in alone)


def test_a_mixture_of_bfloat16_models_is_averaged_in_float32():
    with torch.no_grad():
        log_probs = mixture_of(KINDS[1]).bfloat16()(torch.from_numpy(ids_of(2, 8)))
    assert log_probs.dtype == torch.float32
    assert (log_probs.exp().sum(-1) - 1).abs().max() < 1e-6


def test_a_character_that_one_model_finds_impossible_stays_possible():
    logits = [torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -1e30]])]
    assert mixture_of(KINDS[0]).average(logits[:1] * 2 + logits[1:]).exp().tolist() == [
        pytest.approx([2 / 3, 1 / 3])
    ]


# ------------------------------------------------------------------------------------- generation


def test_a_new_window_forgets_the_old_context():
    """Also for the n-grams: with the old context they are surer of what comes next."""
    gpts, counted = mixture_of(KINDS[0], torch.float32).gpts, np.tile(np.arange(4), 30)
    mixture = Mixture(gpts, NgramModel(counted, 4, V), ngram_weight=0.4)
    used, fresh = MixtureDecoder(mixture), MixtureDecoder(mixture)
    used.prefill(np.array([0, 1]))
    assert (used.prefill(np.array([2])) == fresh.prefill(np.array([2]))).all()


@pytest.mark.parametrize(
    "settings, window",
    [
        ({"temperature": 0.0}, "stepped"),
        ({"temperature": 0.7, "top_k": 4}, "stepped"),
        ({"temperature": 1.3, "top_p": 0.8}, "stepped"),
        ({"min_p": 0.2}, "exact"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_generated_text_equals_a_plain_loop_over_averaged_probabilities(kind, settings, window):
    mixture, prompt = mixture_of(kind), ids_of(3, 3)
    expected = plain_loop(mixture, prompt, Sampler(5, range(3), **settings), 40, window)
    for cache in (True, False):
        sampler = Sampler(5, range(3), **settings)
        result = generate(mixture, prompt, sampler, 40, cache=cache, window=window)
        assert np.array_equal(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_decoder_serves_every_gpt_of_a_mixture(kind, monkeypatch):
    steps, step = [], FastDecoder.step
    monkeypatch.setattr(
        FastDecoder, "step", lambda self, token: steps.append(self) or step(self, token)
    )
    mixture, prompt = mixture_of(kind, torch.float32), ids_of(1, 2)
    expected = plain_loop(mixture, prompt, Sampler(5), 40, "stepped")
    assert not steps
    generation = Generation(mixture, Sampler(5))  # conftest.py: a fall-back is an error
    generation.append(prompt)
    assert [generation.step()[0] for _ in range(40)] == expected[0].tolist()
    assert type(generation.decoder) is MixtureDecoder
    assert len(set(steps)) == 3 and len(steps) % 3 == 0 and len(steps) > 60


# --------------------------------------------------------------------------------------- sample.py


@pytest.fixture(scope="session")
def other_checkpoint(smoke, tmp_path_factory):
    """Return a function that writes a random model of the smoke run's vocabulary, or of another."""
    saved = checkpoint.load(smoke / "best.safetensors")

    def write(name, vocabulary=saved.vocabulary, data=saved.config.data, **changes):
        path = tmp_path_factory.mktemp("others") / f"{name}.safetensors"
        config = dataclasses.replace(SMALL, **{"block_size": 64} | changes)
        other = checkpoint_of(noisy(GPT(config, len(vocabulary)), 0.5, 3), vocabulary)
        other = dataclasses.replace(other, config=Config(data, config))
        write_atomic(path, checkpoint.to_bytes(other))
        return path

    return write


@pytest.fixture
def predictors(smoke, other_checkpoint):
    """The options of two checkpoints, the GPTs in them, an n-gram model, and their tokenizer."""
    paths = smoke / "best.safetensors", other_checkpoint("other", n_layer=3)
    saved = [checkpoint.load(path) for path in paths]
    tokenizer = CharTokenizer(saved[0].vocabulary)
    ngram_model = NgramModel(tokenizer.encode(PLAY.read_text()), NGRAM_ORDER, len(tokenizer))
    gpts = [checkpoint.build_model(each).eval() for each in saved]
    return [f"--ckpt={path}" for path in paths], gpts, ngram_model, tokenizer


def printed(capsys, *arguments):
    """Run sample.py; return its standard output."""
    assert sample_main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def test_sample_draws_from_several_checkpoints_and_n_grams(predictors, capsys):
    both, gpts, ngram_model, tokenizer = predictors
    prompt = tokenizer.encode("So ")[None].astype(np.int64)
    cases = [
        (both, Mixture(gpts)),
        ([*both, f"--ngrams={PLAY}"], Mixture(gpts, ngram_model, 0.3)),
        ([both[0], f"--ngrams={PLAY}", "--ngram-weight=0.6"], Mixture(gpts[:1], ngram_model, 0.6)),
    ]
    texts = set()
    for words, mixture in cases:
        sampler = Sampler(5, temperature=0.9, top_k=5)
        result = generate(mixture, prompt, sampler, 90, cache=False)
        expected = f"So {tokenizer.decode(result[0])}\n"
        command = [*words, "--prompt=So ", "--max-new-tokens=90", "--seed=5", "--temperature=0.9"]
        for more in ([], ["--no-cache"]):
            assert printed(capsys, *command, "--top-k=5", *more) == expected
        assert expected in printed(capsys, *command, "--top-k=5", "--num-samples=3")
        texts.add(expected)
    assert len(texts) == 3


def test_sample_scores_with_averaged_probabilities(predictors, tmp_path, capsys):
    both, gpts, ngram_model, tokenizer = predictors
    text = "So it is, and so it was.\n" * 20
    (tmp_path / "text.txt").write_text(text)
    mixture, ids = Mixture(gpts, ngram_model, 0.2), torch.from_numpy(tokenizer.encode(text)).long()
    nats = 0.0
    for start in range(0, len(ids) - 1, 64):
        y = ids[start + 1 : start + 65]
        with torch.no_grad():
            log_probs = mixture(ids[None, start : start + len(y)])[0]
        nats -= log_probs.gather(1, y[:, None]).sum().item()
    words = [f"--score={tmp_path / 'text.txt'}", f"--ngrams={PLAY}", "--ngram-weight=0.2"]
    loss = nats / (len(ids) - 1)
    assert printed(capsys, *both, *words, "--device=cpu").startswith(f"{loss:.4f} nats, ")


def test_one_checkpoint_without_n_grams_is_used_as_it_is(smoke):
    assert type(sample.Session(parse_sample_options([f"--ckpt={smoke}"])).model) is GPT


def test_the_n_grams_are_read_with_the_encoding_newlines_and_min_count_of_the_run(
    other_checkpoint, tmp_path
):
    text = "größe \r\nöl 1\r\n" * 30
    for encoding, newlines, min_count, expected in (
        ("cp1252", "unix", 5, f"größe \nöl {UNK}\n"),
        ("utf-16-le", "keep", 1, "größe \r\nöl 1\r\n"),
    ):
        path = tmp_path / encoding
        path.write_bytes(text.encode(encoding))
        data = DataConfig(encoding=encoding, newlines=newlines, min_count=min_count)
        ckpt = other_checkpoint(encoding, "".join(sorted(set(expected))), data)
        words = [f"--ckpt={ckpt}", f"--ngrams={path}"]
        session = sample.Session(parse_sample_options(words))
        assert session.tokenizer.decode(session.ngram_model.ids) == expected * 30


@pytest.mark.parametrize(
    "content, options, code, message",
    [
        (None, [], 3, "No such file or directory; name a text file that can be read"),
        (b"", [], 3, "no known characters; use another text"),
        ("\xe9".encode(), ["--unknown=skip"], 3, "no known characters; use another text"),
        (b"a" * 10_000_001, [], 3, "more than 10,000,000 characters, which is the most allowed"),
        (b"So \xff", [], 3, "not UTF-8 at byte 3"),
        ("So \xe9".encode(), [], 2, "--ngrams: not in the vocabulary: '\xe9' (U+00E9)"),
        ("So \xe9".encode(), ["--unknown=skip"], 0, None),
        (b"So", ["--ngram-weight=1"], 2, "must be a number in (0, 1)"),
    ],
)
def test_a_text_of_n_grams_that_cannot_be_used_gets_one_line(
    smoke, tmp_path, content, options, code, message
):
    path = tmp_path / "ngrams.txt"
    if content is not None:
        path.write_bytes(content)
    words = [f"--ckpt={smoke}", f"--ngrams={path}", "--max-new-tokens=2", *options]
    if not code:
        assert sample_main(words) == 0
        return
    with pytest.raises(UserError) as caught:
        sample_main(words)
    assert caught.value.exit_code == code and message in printed_error(caught.value)


@pytest.mark.parametrize(
    "start, overlap, too_low", [(0, 200, True), (3000, 200, True), (3000, 199, False)]
)
def test_a_scored_text_that_is_in_the_n_grams_text_is_named(
    smoke, tmp_path, capsys, start, overlap, too_low
):
    other = (ROOT / "data" / "plays" / "orchard.txt").read_text()[:500]
    shared = PLAY.read_text()[start : start + overlap]
    # the next character differs from that of the play, so no run is longer
    (tmp_path / "text.txt").write_text(f"{other}#{shared}#{other}".replace("#", "\n\n\n"))
    words = [f"--ckpt={smoke}", f"--score={tmp_path / 'text.txt'}", f"--ngrams={PLAY}"]
    assert sample_main(words) == 0
    assert ("so this loss is too low" in capsys.readouterr().err) == too_low


@pytest.mark.parametrize(
    "change, block_size, difference",
    [
        (
            lambda known: known[1:] + "\xe9",
            64,
            "vocabulary (only one has '\\n' (U+000A), '\xe9' (U+00E9));",
        ),
        (lambda known: known[1:] + known[0], 64, "vocabulary;"),
        (lambda known: known, 32, "model.block_size ('32' and '64');"),
    ],
    ids=["characters", "their order", "block_size"],
)
def test_models_that_cannot_be_averaged_are_refused_with_the_difference(
    smoke, other_checkpoint, change, block_size, difference
):
    first = smoke / "best.safetensors"
    vocabulary = change(checkpoint.load(first).vocabulary)
    other = other_checkpoint("other", vocabulary, block_size=block_size)
    with pytest.raises(UserError) as caught:
        sample_main([f"--ckpt={smoke}", f"--ckpt={other}"])
    assert caught.value.exit_code == 4
    message = printed_error(caught.value)
    assert message.startswith(f"{other}: differs from {first} in {difference}"), message
