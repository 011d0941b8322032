"""The n-gram model against a plain implementation, and its mixture with a GPT, up to sample.py."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch

import sample
from checkpointing import checkpoint
from checkpointing.file_format import read, to_bytes
from common.errors import CheckpointError, ConfigError
from configs.schema import ModelConfig
from data.batches import Split, evaluation_windows
from data.tokenizer import CharTokenizer
from model.ensemble import Ensemble
from model.generate import Generation, Sampler
from model.gpt import GPT
from model.ngram_model import NgramMixture, NgramModel
from tests.campaigns.common import at_step, same_runs, scalars, small_run_args, train
from tests.conftest import ROOT
from training import state
from training.evaluate import exact_loss
from training.runtime import select_runtime

V = 5
PLAYS = ROOT / "data" / "plays"


class PlainKneserNey:
    """Modified Kneser-Ney smoothing by dictionaries, as Chen and Goodman 1998 define it."""

    def __init__(self, text, order, vocab_size):
        self.vocab_size, self.counts = vocab_size, {}
        ngrams = [tuple(text[i : i + order]) for i in range(len(text) - order + 1)]
        counts = Counter(ngrams)
        for n in range(order, 0, -1):
            self.counts[n] = counts
            counts = Counter(ngram[1:] for ngram in counts)  # different first characters
        self.discounts = {n: self._discounts(n) for n in self.counts}

    def _discounts(self, n):
        of_count = Counter(self.counts[n].values())
        if not (of_count[1] and of_count[2] and of_count[3]):
            return [0, 0.5, 1, 1.5]
        y = of_count[1] / (of_count[1] + 2 * of_count[2])
        found = [0] + [k - (k + 1) * y * of_count[k + 1] / of_count[k] for k in (1, 2, 3)]
        return found if min(found[1:]) > 0 else [0, 0.5, 1, 1.5]

    def prob(self, context, character):
        """The probability of a character after a context shorter than the longest n-gram."""
        if len(context) == 0:
            lower = 1 / self.vocab_size
        else:
            lower = self.prob(context[1:], character)
        counts, discounts = self.counts[len(context) + 1], self.discounts[len(context) + 1]
        after = {ngram: count for ngram, count in counts.items() if ngram[:-1] == context}
        if not after:
            return lower
        total = sum(after.values())
        count = after.get((*context, character), 0)
        left = sum(discounts[min(each, 3)] for each in after.values())
        return (count - discounts[min(count, 3)] + left * lower) / total


def text_of(length, seed=0):
    """A random text in which some n-grams are frequent and one character is missing."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, V - 1, length) * rng.integers(0, 2, length)


@pytest.mark.parametrize("order, length", [(1, 9), (2, 50), (3, 300), (4, 300), (5, 60), (4, 2000)])
def test_probabilities_are_those_of_the_definition(order, length):
    text = text_of(length, order)
    ids = np.random.default_rng(1).integers(0, V, (3, 9))
    ids[0, :6] = text[:6]
    found = NgramModel(text, order, V).probs(ids, 9)
    plain = PlainKneserNey(text.tolist(), order, V)
    for row in range(3):
        for t in range(9):
            context = tuple(ids[row, max(0, t + 2 - order) : t + 1].tolist()) if order > 1 else ()
            expected = [plain.prob(context, character) for character in range(V)]
            assert found[row, t] == pytest.approx(expected, abs=1e-6), (row, t)
    assert np.abs(found.sum(-1) - 1).max() < 1e-6 and found.min() > 0


def test_the_last_new_tokens_have_the_probabilities_that_they_have_in_the_whole():
    model, ids = NgramModel(text_of(500), 4, V), text_of(40, 1).reshape(2, 20)
    whole = model.probs(ids, 20)
    for new in (1, 2, 3, 19):
        assert np.array_equal(model.probs(ids, new), whole[:, -new:])


@pytest.mark.parametrize("order", [1, 2, 4, 5])
def test_the_probabilities_of_one_text_are_those_of_a_batch(order):
    model, ids = NgramModel(text_of(500), order, V), np.random.default_rng(0).integers(0, V, 200)
    for start in range(190):
        for tokens in range(1, 8):
            text = ids[start : start + tokens]
            assert np.array_equal(model.next_probs(text), model.probs(text[None], 1)[0, 0])


def test_the_longest_ngrams_are_shorter_for_a_large_vocabulary_or_a_short_text():
    assert NgramModel(text_of(500), 16, V).order == 16
    assert NgramModel(np.arange(300) % 256, 8, 256).order == 7  # 2^(8 * 7) <= 2^63
    assert NgramModel(np.array([1, 2, 3]), 7, V).order == 3
    assert NgramModel(np.array([1]), 7, V).probs(np.array([[1, 1]]), 2).sum() == pytest.approx(2)


def test_no_character_is_impossible_where_the_formula_gives_a_discount_of_zero():
    text = "1002002220202020020221 0".replace(" ", "")
    ids = np.array([int(character) for character in text[:23]])
    assert NgramModel(ids, 2, 4).probs(np.array([[1]]), 1).min() > 0


def test_a_longer_ngram_model_predicts_a_play_better():
    texts = [path.read_text(encoding="utf-8") for path in sorted(PLAYS.glob("*.txt"))]
    vocabulary = CharTokenizer.from_text("".join(texts))
    known, new = (vocabulary.encode(text) for text in ("".join(texts[1:]), texts[0][:20_000]))
    losses = []
    for order in range(1, 6):
        probs = NgramModel(known, order, len(vocabulary)).probs(new[None, :-1], len(new) - 1)[0]
        losses.append(-np.log(probs[np.arange(len(new) - 1), new[1:]]).mean())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[1] - 0.4


# ------------------------------------------------------------------------------------ the mixture


def mixture(dtype=torch.float64, seed=0, **settings):
    settings = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8} | settings
    config = ModelConfig(**settings, ngram_model=3, ngram_weight=0.4)
    gpt = GPT(config, V, seed)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)  # initially almost uniform
    return NgramMixture(gpt.to(dtype), NgramModel(text_of(400, seed), 3, V)).eval()


def test_the_mixture_is_the_weighted_mean_at_every_position():
    model, ids = mixture(), torch.from_numpy(text_of(24, 2).reshape(3, 8))
    with torch.no_grad():
        expected = 0.6 * model.gpt(ids).softmax(-1)
        expected += 0.4 * torch.from_numpy(model.ngram_model.probs(ids.numpy(), 8)).double()
        found = model(ids).exp()
    assert (found - expected).abs().max() < 1e-12 and (found.sum(-1) - 1).abs().max() < 1e-6


def test_the_mixture_of_a_bfloat16_gpt_is_computed_in_float32():
    with torch.no_grad():
        logits = mixture(torch.bfloat16)(torch.from_numpy(text_of(8)[None]))
    assert logits.dtype == torch.float32 and (logits.exp().sum(-1) - 1).abs().max() < 1e-6


def test_caches_give_the_same_logits():
    model, ids = mixture(), torch.from_numpy(text_of(16, 3).reshape(2, 8))
    caches = model.new_caches()
    with torch.no_grad():
        parts = [model(ids[:, :end], caches) for end in (2, 3, 8)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("members", [1, 2])
def test_generated_text_is_the_same_with_cache_fast_decoder_and_in_a_batch(members):
    models = [mixture(torch.float32, seed) for seed in range(members)]
    model = models[0] if members == 1 else Ensemble(models)

    def generate(samples, **options):
        generation = Generation(model, Sampler(5, samples), **options)
        generation.append(np.tile(text_of(3), (len(samples), 1)))
        return np.stack([generation.step() for _ in range(30)], axis=1), generation

    expected, _ = generate([0], cache=False)
    found, generation = generate([0])  # conftest.py: a fall-back is an error
    assert generation.decoder_checked and np.array_equal(found, expected)
    assert np.array_equal(generate([0], fast=False)[0], expected)
    assert np.array_equal(generate([0, 1])[0][:1], expected)


# ------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run with an n-gram model, and without."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (("with", ["--ngram_model=4", "--ngram_weight=0.5"]), ("without", [])):
        code, output = train(*small_run_args(folder), *options, f"--out_dir={folder}/{name}")
        assert code == 0, output
        (folder / f"{name}.log").write_text(output)
    return folder


def loss_of(model, text):
    windows = evaluation_windows(Split(text, ((0, len(text)),)), model.config.block_size, 64)
    return exact_loss(model, windows, select_runtime("cpu", "float32"))


def test_the_network_is_trained_alone_and_the_mixture_is_evaluated(runs):
    logged = [scalars(runs / name) for name in ("with", "without")]
    assert logged[0]["train/loss"] == logged[1]["train/loss"]
    assert logged[0]["val/loss"][-1][1] < logged[1]["val/loss"][-1][1] - 0.1
    saved = [checkpoint.load(runs / name / "last.safetensors") for name in ("with", "without")]
    for name, tensor in saved[1].tensors.items():
        assert torch.equal(saved[0].tensors[name], tensor), name
    text = (runs / "text.txt").read_text(encoding="utf-8")
    ids = CharTokenizer(saved[0].vocabulary).encode(text)
    known, new = ids[: -len(ids) // 10], ids[-len(ids) // 10 :]
    assert saved[0].tensors[checkpoint.NGRAM_TEXT].tolist() == ids[: int(len(ids) * 0.9)].tolist()
    model = checkpoint.build_eval_model(saved[0], saved[0].config.model)
    assert loss_of(model, new) == pytest.approx(logged[0]["val/loss"][-1][1], abs=1e-6)
    ngrams = NgramModel(known, 4, len(saved[0].vocabulary)).size[0]
    assert f"n-grams     {ngrams:,} with up to 4 characters, " in (runs / "with.log").read_text()


def test_a_resumed_run_is_the_run_that_never_stopped(runs, tmp_path, monkeypatch):
    options = [*small_run_args(runs), "--ngram_model=4", "--ngram_weight=0.5"]
    with monkeypatch.context() as patch:
        at_step(patch, 13, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        assert train(*options, f"--out_dir={tmp_path}/run")[0] == 130
    code, output = train(*options, f"--out_dir={tmp_path}/run", "--resume")
    assert code == 0 and "the best loss is reset" not in output
    assert same_runs(tmp_path / "run", runs / "with")


def test_sample_scores_and_generates_with_the_mixture(runs, tmp_path, capsys):
    text = (runs / "text.txt").read_text(encoding="utf-8")[:500]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    scores = {}
    for names in (["with"], ["without"], ["with", "without"]):
        ckpts = [f"--ckpt={runs / name}" for name in names]
        assert sample.main([*ckpts, f"--score={tmp_path / 'text.txt'}", "--device=cpu"]) == 0
        scores["+".join(names)] = float(capsys.readouterr().out.split()[0])
    assert scores["with"] < scores["with+without"] < scores["without"] - 0.3
    texts = set()
    for options in ([], ["--no-cache"], ["--dtype=float32"]):
        assert sample.main([f"--ckpt={runs}/with", "--max_new_tokens=40", *options]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_a_page_has_the_gpt_alone_and_says_so(runs, tmp_path, capsys):
    pages = []
    for name in ("with", "without"):
        path = tmp_path / f"{name}.html"
        assert sample.main([f"--ckpt={runs / name}", f"--html={path}"]) == 0
        assert ("the page runs the GPT alone" in capsys.readouterr().err) == (name == "with")
        pages.append(path.read_text(encoding="utf-8"))
    assert '"loss": null' in pages[0] and '"loss": null' not in pages[1]


@pytest.mark.parametrize(
    "text",
    [
        None,
        torch.tensor([], dtype=torch.uint8),
        torch.tensor([0, 255], dtype=torch.uint8),
        torch.tensor([[0, 1]], dtype=torch.uint8),
        torch.tensor([0, 1], dtype=torch.int32),
    ],
    ids=["missing", "empty", "unknown id", "matrix", "dtype"],
)
def test_a_checkpoint_with_an_invalid_text_is_refused(runs, text):
    saved = checkpoint.load(runs / "with" / "best.safetensors")
    tensors = {name: each for name, each in saved.tensors.items() if name != checkpoint.NGRAM_TEXT}
    if text is not None:
        tensors[checkpoint.NGRAM_TEXT] = text
    saved = dataclasses.replace(saved, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"ngram_model\.text is missing or invalid"):
        checkpoint.build_eval_model(saved, saved.config.model)


def test_a_text_that_is_too_long_is_refused(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(state, "MAX_NGRAM_TEXT", 5000)
    code, output = train(*small_run_args(runs), "--ngram_model=4", f"--out_dir={tmp_path}/run")
    assert code == ConfigError.exit_code
    assert "model.ngram_model: the training text has 5,400 characters; at most 5,000" in output
    assert not list(tmp_path.glob("run/*.safetensors"))


def test_a_new_run_from_a_mixture_has_the_ngrams_of_its_own_text(runs, tmp_path):
    (tmp_path / "other.txt").write_text("Zwei größere Äpfel, " * 200, encoding="utf-8")
    options = [word for word in small_run_args(runs) if not word.startswith("--data.sources")]
    options += [f"--data.sources={tmp_path / 'other.txt'}", "--ngram_model=4"]
    options += [f"--init_from={runs / 'with'}", "--new_characters=add"]
    code, output = train(*options, f"--out_dir={tmp_path}/run")
    assert code == 0, output
    saved = checkpoint.load(tmp_path / "run" / "best.safetensors")
    text = CharTokenizer(saved.vocabulary).decode(saved.tensors[checkpoint.NGRAM_TEXT].numpy())
    assert text == ("Zwei größere Äpfel, " * 200)[:3600]


def test_a_checkpoint_with_a_removed_setting_is_loaded_if_it_had_no_effect(runs, tmp_path):
    metadata, tensors = read(runs / "without" / "last.safetensors")
    metadata = {name: text for name, text in metadata.items() if name in checkpoint.PARTS}
    path, config = tmp_path / "old.safetensors", metadata["config"]
    for value, code in (("0.0", 0), ("0.5", CheckpointError.exit_code)):
        old = config.replace('"model": {', f'"model": {{"ngram_dropout": {value}, ')
        assert old != config
        path.write_bytes(to_bytes(metadata | {"config": old}, tensors))
        if code:
            with pytest.raises(CheckpointError, match="unknown key 'ngram_dropout'"):
                checkpoint.load(path)
        else:
            assert math.isfinite(checkpoint.load(path).progress["best_loss"])
