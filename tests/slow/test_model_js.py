"""The page computes what the model does: model.js against GPT and Sampler, by Node."""

import base64
import itertools
import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import playwright
import pytest
import torch

from data.tokenizer import CharTokenizer
from model.generate import Sampler, window_start
from page import export
from tests.variants import random_model

PAGE_CHOICES = {  # what model.js computes; a fork may have more
    "positions": ("learned", "rope"), "n_previous": (0, 3), "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "relu2"), "tie_weights": (False, True), "qk_norm": (False, True),
    "logit_softcap": (0.0, 15.0),
}  # fmt: skip
SIZES = (  # n_layer, n_head, n_embd, block_size
    {"n_layer": 1, "n_head": 1, "n_embd": 2, "block_size": 1},
    {"n_layer": 3, "n_head": 3, "n_embd": 30, "block_size": 5},
    {"n_layer": 2, "n_head": 5, "n_embd": 70, "block_size": 33},
)


def run_node(code, given):
    """Run JavaScript with the page's functions and `given`; return what `code` returns.

    `modelOf(page)` is the model of a page. The package playwright brings Node.
    """
    source = export.read("model.js") + export.read("text.js")
    source += "const modelOf = (page) => new GPT(page.config, decodeWeights(page.weights, "
    source += f"page.shapes)); const given = {json.dumps(given)};"
    source += f"console.log(JSON.stringify((() => {{ {code} }})()));"
    node = next((Path(playwright.__file__).parent / "driver").glob("node*"))
    done = subprocess.run([node, "-"], input=source, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def packed(model, ids):
    """Return the model as the page gets it, for `run_node`."""
    shapes, weights = export.pack_weights(model)
    weights = base64.b64encode(weights).decode()
    return {"config": asdict(model.config), "shapes": shapes, "weights": weights, "ids": ids}


def test_js_logits():
    """For all settings that a page has, and every size."""
    rng, values = np.random.default_rng(1), itertools.product(*PAGE_CHOICES.values())
    choices = [dict(zip(PAGE_CHOICES, each, strict=True)) for each in values]
    models = [random_model(i, **each) for i, each in enumerate([*choices, *SIZES])]
    texts = [rng.integers(0, 11, model.config.block_size).tolist() for model in models]
    code = """
    return given.map((each) => {
      const reader = new Reader(modelOf(each));
      return each.ids.map((_, i) => Array.from(reader.read(each.ids, i + 1)));
    });
    """
    found = run_node(code, list(map(packed, models, texts)))
    for model, ids, logits in zip(models, texts, found, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids]))[0].numpy()
        largest = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * largest)


def test_js_logits_of_an_edited_text():
    """The caches of the text before are reused up to the first change alone."""
    model, texts = random_model(), [[1, 2, 3, 4, 5], [1, 2, 9, 4, 5, 6], [1, 7]]
    code = """
    const reader = new Reader(modelOf(given));
    return given.ids.map((text) => Array.from(reader.read(text, text.length)));
    """
    for ids, logits in zip(texts, run_node(code, packed(model, texts)), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids]))[0, -1].tolist()
        assert logits == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("separator", ["\n", "=\n"])
def test_js_window_of_an_item(separator):
    """Each item of a list is read alone."""
    rng, letters = np.random.default_rng(5), "\n=ab"
    cases, expected = [], []
    for text in ("".join(rng.choice([*letters], 30)) for _ in range(50)):
        ids = CharTokenizer(letters).encode(separator[-1] + text).tolist()
        cases += [(ids, n) for n in range(1, 31)]
        for n in range(30):
            item = text[:n].split(separator)[-1]  # what the model has read of the last item
            expected.append(n - len(item) + window_start(len(item) + 1, 8))
    config = {"block_size": 8, "separator": CharTokenizer(letters).encode(separator).tolist()}
    code = "return given.cases.map(([ids, n]) => windowStartIn(ids, n, given.config));"
    assert run_node(code, {"cases": cases, "config": config}) == expected


def test_js_random_numbers():
    """They are uniform, and differ by seed and position."""
    code = "return given.map((seed) => Array.from({ length: 5000 }, (_, n) => uniform(seed, n)));"
    numbers = np.array(run_node(code, [0, 1, 2**32 - 1]))
    assert numbers.min() >= 0 and numbers.max() < 1
    shares = np.stack([np.bincount((10 * row).astype(int)) for row in numbers]) / 5000
    assert np.abs(shares - 0.1).max() < 0.02
    rows = [*numbers[:, 1:], numbers[0, :-1]]  # the last one is the first, moved by a position
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 0.06


def test_js_filters():
    rng, rows = np.random.default_rng(7), []
    choices = {
        "temperature": (0.5, 0.8, 1.0, 2.0), "top_k": (0, 1, 3, 30, 1000),
        "top_p": (1.0, 0.95, 0.5, 0.01), "min_p": (0.0, 0.05, 0.9),
    }  # fmt: skip
    for _ in range(1000):
        logits = rng.normal(0, 3, 40).astype(np.float32)
        logits = logits.round() if rng.random() < 0.3 else logits  # ties
        settings = {name: rng.choice(values).item() for name, values in choices.items()}
        rows.append((logits.tolist(), settings))
    code = """
    return given.map(([logits, settings]) => [
      Array.from(unnormalizedProbs(logits, settings)), sample(logits, { temperature: 0 }),
    ]);
    """
    for (logits, settings), (probs, greedy) in zip(rows, run_node(code, rows), strict=True):
        assert greedy == np.argmax(logits)
        expected = Sampler(**settings).unnormalized_probs(np.array([logits], np.float32))[0]
        assert (np.array(probs) > 0).tolist() == (expected > 0).tolist()
        assert probs == pytest.approx(expected.tolist(), rel=1e-12)
