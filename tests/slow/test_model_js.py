"""The page computes what the model does: model.js against GPT, Sampler and exact_loss, by Node."""

import base64
import itertools
import json
import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import playwright
import pytest
import torch

from common.words import character_name
from data.batches import evaluation_windows
from data.items import ItemFormat
from data.tokenizer import CharTokenizer
from model.generate import Sampler, window_start
from model.inspect import attention_maps
from page import export
from tests.conftest import ROOT
from tests.variants import CHOICES, SIZES, random_model
from training.device import select_runtime
from training.evaluate import exact_loss

LOGITS = """
return given.map((each) => {
  const reader = new Reader(modelOf(each));
  return each.ids.map((_, i) => Array.from(reader.read(each.ids, i + 1)));
});
"""
SCORE = """
let [nats, counted] = [0, 0];
for (const [n, logits] of predictions(modelOf(given), given.ids, given.starts)) {
  if (given.counts && !given.counts[n]) continue;
  nats += scoreCharacter(logits, given.ids[n]).nats;
  counted++;
}
return nats / counted;
"""


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


def packed(model, ids=None):
    """Return the model as the page gets it, for `run_node`."""
    shapes, weights = export.pack_weights(model)
    weights = base64.b64encode(weights).decode()
    return {"config": asdict(model.config), "shapes": shapes, "weights": weights, "ids": ids}


def assert_close(found, expected, tolerance):
    """Within `tolerance` times the larger of 1 and the largest of the expected numbers."""
    found, expected = np.array(found), np.array(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids]))[0].numpy()


# ---------------------------------------------------------------------------------------- the model


def test_logits_are_those_of_the_model_for_every_combination_of_settings_and_every_size():
    sizes = ((1, 1, 2, 1), (1, 3, 30, 5), (3, 4, 16, 3), (2, 5, 70, 33))
    values = [(CHOICES, each) for each in itertools.product(*CHOICES.values())]
    values += [(SIZES, each) for each in sizes]
    choices = [dict(zip(names, each, strict=True)) for names, each in values]
    rng = np.random.default_rng(1)
    models = [random_model(i, **each) for i, each in enumerate(choices)]
    texts = [
        rng.integers(0, model.vocab_size, model.config.block_size).tolist() for model in models
    ]
    found = run_node(LOGITS, list(map(packed, models, texts)))
    for model, ids, logits in zip(models, texts, found, strict=True):
        assert_close(logits, logits_of(model, ids), 1e-5)


def test_logits_of_an_edited_text_are_those_of_the_new_text():
    model, texts = random_model(), [[1, 2, 3, 4, 5], [1, 2, 9, 4, 5, 6], [1, 7]]
    code = """
    const reader = new Reader(modelOf(given));
    return given.ids.map((text) => Array.from(reader.read(text, text.length)));
    """
    for ids, logits in zip(texts, run_node(code, packed(model, texts)), strict=True):
        assert_close(logits, logits_of(model, ids)[-1], 1e-5)


@pytest.mark.parametrize("separator", ["\n", "=\n"])
def test_each_item_of_a_list_is_read_alone(separator):
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


@pytest.mark.parametrize(
    ("separator", "answer_after"), [("\n", ""), ("\n\n", ""), ("==", "?"), ("\n\n", "?\n")]
)
def test_a_list_is_scored_as_by_score(separator, answer_after):
    """The items, and with questions the characters that count, are those of ItemFormat."""
    items = ["\na\n", "aab", "=\na \nbb", "b\t ", "b", " \n ", " ", "", " a=ba "]
    newlines = separator != "\n" and "\n" not in answer_after
    items = [item for item in items if newlines or "\n" not in item]
    items = [f"{item}{answer_after}{item[::-1]}" if item.strip() else item for item in items]
    text = separator.join([*items, f"b{answer_after}"])
    item_format, tokenizer = ItemFormat(separator, answer_after), CharTokenizer("\n\t =?ab")
    items = item_format.items_of("text", [text])
    split = item_format.encode_items(items, tokenizer.encode)
    laid_out = run_node("return layOut(given[0], given[1]);", [text, vars(item_format)])
    ids = tokenizer.encode("".join(laid_out["characters"])).tolist()
    assert ids == split.ids[len(separator) - 1 :].tolist()
    model = random_model(vocab_size=len(tokenizer))
    windows = evaluation_windows(split, model.config.block_size, 3)
    nats = exact_loss(model, windows, select_runtime("cpu", "float32"))
    assert run_node(SCORE, packed(model, ids) | laid_out) == pytest.approx(nats, abs=1e-5)


def test_the_shares_of_a_head_are_its_attention_to_the_character_before_and_by_induction():
    """Induction: attention to what followed the last two characters when they occurred earlier."""
    ids, model = np.random.default_rng(4).integers(0, 3, 64).tolist(), random_model(block_size=64)
    code = """
    const [model, shares] = [modelOf(given), []];
    for (const [n] of readWindow(model, given.ids, 0, given.ids.length)) {
      shares.push(headShares(given.ids, n - 1, model.attention));
    }
    return [meanShares(shares.map((share) => share.previous)),
            meanShares(shares.map((share) => share.induction))];
    """
    maps = torch.cat(attention_maps(model, torch.tensor(ids))).numpy()  # (L * H, T, T)
    before = {p: [p - 1] for p in range(1, 64)}
    after = {
        p: [j + 1 for j in range(1, p) if ids[j - 1 : j + 1] == ids[p - 1 : p + 1]]
        for p in range(64)
    }
    for found, attended in zip(run_node(code, packed(model, ids)), (before, after), strict=True):
        attended = {p: positions for p, positions in attended.items() if positions}
        sums = [maps[:, p, positions].sum(axis=1) for p, positions in attended.items()]
        uniform = [len(positions) / (p + 1) for p, positions in attended.items()]
        assert_close(found["heads"], np.mean(sums, axis=0), 1e-5)
        assert found["uniform"] == pytest.approx(np.mean(uniform))


# ----------------------------------------------------------------------------------------- sampling


def test_random_numbers_are_those_of_numpy():
    rng = np.random.default_rng(6)
    pairs = [(0, 0), (2**32 - 1, 10**12), *rng.integers(0, [2**32, 10**12], (98, 2)).tolist()]
    code = """
    return given.map(([seed, i]) => {
      const generator = new PCG64(seed, i);
      return [0, 1, 2, 1000].map((n) => generator.random(n));
    });
    """
    for (seed, i), found in zip(pairs, run_node(code, pairs), strict=True):
        numbers = np.random.Generator(np.random.PCG64((seed, i))).random(1001)
        assert found == numbers[[0, 1, 2, 1000]].tolist()


def test_filters_are_those_of_the_sampler():
    rng, rows = np.random.default_rng(7), []
    for _ in range(1000):
        settings = {
            "temperature": float(rng.choice([0.5, 0.8, 1.0, 2.0])),
            "top_k": int(rng.choice([0, 1, 3, 30, 1000])),
            "top_p": float(rng.choice([1.0, 0.95, 0.5, 0.01])),
            "min_p": float(rng.choice([0.0, 0.05, 0.9])),
        }
        logits = rng.normal(0, 3, 40).astype(np.float32)
        if rng.random() < 0.3:
            logits = logits.round()  # ties
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


# ----------------------------------------------------------------------------------------- the file


def test_a_character_has_the_same_name_in_python_and_in_the_page():
    names = {"\n": "newline", "\t": "tab", " ": "space", "\x1b": "U+001B"}
    names |= {c: c for c in "aé中ب\U0001f600"}
    names |= {c: f"U+{ord(c):04X}" for c in "\u00a0\u200d\u202e\u0301\ue000\U000e0067"}
    assert {character: character_name(character) for character in names} == names
    assert run_node("return given.map(characterName);", [*names]) == [*names.values()]


def test_the_page_in_docs_is_of_the_present_code_and_knows_the_plays():
    """Its model comes from

    python train.py configs/fast.yaml --sources=data/plays --block_size=128 --max_iters=1000 \\
        --warmup_ratio=0.05 --cooldown_ratio=0.9 --learning_rate=0.02 \\
        --muon_learning_rate=0.02 --muon_momentum=0.9 --eval_interval=250 --out_dir=out/plays
    python sample.py --ckpt out/plays --html docs/plays.html
    """
    page = (ROOT / "docs" / "plays.html").read_text(encoding="utf-8")
    assert len(page) < 2_500_000
    logits = re.compile(r'"check": \{.*?\}')  # their last digits depend on the CPU
    assert logits.sub("", export.refresh(page).decode()) == logits.sub("", page), (
        "run: python -m page.export docs/plays.html"
    )
    text = (ROOT / "data" / "plays" / "orchard.txt").read_text()[-2000:]  # it did not train on it
    scripts = dict(re.findall(r'<script [^>]*id="([\w-]+)">(.*?)</script>', page, re.DOTALL))
    given = json.loads(scripts["data"]) | {"weights": scripts["weights"]}
    ids = [given["vocabulary"].index(character) for character in text]
    assert run_node(SCORE, given | {"ids": ids}) < 1.35


def test_the_page_reads_a_text_in_the_unicode_form_that_sample_py_reads():
    rng, letters = np.random.default_rng(8), [*"ae\xe9\u0301\xe1\uac00\u1100\u1161\u212b\xc5"]
    cases, expected = [], []
    for _ in range(300):
        vocabulary = "".join(rng.permutation(letters)[: rng.integers(1, 10)])
        text = "".join(rng.choice(letters, 6))
        cases.append([text, vocabulary])
        expected.append(CharTokenizer(vocabulary).in_known_form(text))
    code = "return given.map(([text, known]) => inKnownForm(text, new Set(known)));"
    assert run_node(code, cases) == expected
    assert sum(form != text for form, (text, _) in zip(expected, cases, strict=True)) > 50
