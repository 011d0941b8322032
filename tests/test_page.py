"""The page computes what the model does: model.js against GPT, Sampler and exact_loss, by Node, and
what an exported file contains. What the page shows is in test_browser.py.
"""

import base64
import itertools
import json
import os
import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import playwright
import pytest
import torch

from common.errors import ConfigError
from configs.schema import ModelConfig
from data.batches import Split, evaluation_windows
from data.items import ItemFormat
from data.tokenizer import CharTokenizer, character_name
from model.generate import Sampler, window_start
from model.gpt import GPT
from model.inspect import attention_maps
from model.parameters import parameter_count
from page import export
from run import checkpoint
from run.checkpoint import TextInfo
from tests.commands import exit_code, sample_main
from tests.conftest import ROOT
from tests.variants import CHOICES, noisy, save_model
from training.device import select_runtime
from training.evaluate import exact_loss

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 8}
V = 11
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


def parts_of(page):
    """Return the scripts of a page by id: data, weights, worker-code, model-code."""
    return dict(re.findall(r'<script [^>]*id="([\w-]+)">(.*?)</script>', page, re.DOTALL))


def random_model(seed=0, vocab_size=V, **choices):
    """A small model in which no parameter is neutral: biases are not 0, norm weights not 1."""
    config = ModelConfig(logit_scale=0.8, **SIZES | choices)
    return noisy(GPT(config, vocab_size), seed=seed).eval()


def packed(model, ids=None):
    """Return the model as the page gets it, for `run_node`."""
    shapes, weights = export.pack_weights(model)
    return {
        "config": asdict(model.config),
        "shapes": shapes,
        "weights": base64.b64encode(weights).decode(),
        "ids": ids,
    }


def assert_close(found, expected, tolerance):
    """Within `tolerance` times the larger of 1 and the largest of the expected numbers."""
    found, expected = np.array(found), np.array(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids]))[0].numpy()


@pytest.fixture(scope="module")
def trained(smoke, tmp_path_factory):
    """The page of a trained model, as sample.py writes it, and the model."""
    path = tmp_path_factory.mktemp("pages") / "smoke.html"
    assert sample_main([f"--ckpt={smoke}", f"--html={path}", "--prompt=KING", "--device=cpu"]) == 0
    saved = checkpoint.load(smoke / "best.safetensors")
    return path, checkpoint.build_model(saved).eval(), saved.vocabulary


def given_of(path):
    """The input of `run_node` that a page contains."""
    parts = parts_of(path.read_text(encoding="utf-8"))
    return json.loads(parts["data"]) | {"weights": parts["weights"]}


# ---------------------------------------------------------------------------------------- the model


def test_logits_are_those_of_the_model_for_every_combination_of_settings_and_every_size():
    sizes = ((1, 1, 2, 1), (1, 3, 30, 5), (3, 4, 16, 3), (2, 5, 70, 33))
    values = [(CHOICES, each) for each in itertools.product(*CHOICES.values())]
    values += [(SIZES, each) for each in sizes]
    choices = [dict(zip(names, each, strict=True)) for names, each in values]
    rng = np.random.default_rng(1)
    models = [random_model(i, **each) for i, each in enumerate(choices)]
    texts = [rng.integers(0, V, model.config.block_size).tolist() for model in models]
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


SEPARATORS = ("\n", "\n\n", "==", "=\n")  # an item may contain a part of each but the first
LISTS = [*itertools.product(SEPARATORS, ("", "?", "=?")), ("\n\n", "?\n"), ("==", "? ")]


@pytest.mark.parametrize("separator", SEPARATORS)
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


@pytest.mark.parametrize(("separator", "answer_after"), LISTS)
def test_a_list_is_scored_as_by_score(separator, answer_after):
    """The items, and with questions the characters that count, are those of ItemFormat."""
    items = ["\na\n", "aab", "=\na \nbb", "b\t ", "b", " \n ", " ", "", " a=ba "]
    newlines = separator != "\n" and "\n" not in answer_after
    items = [item for item in items if newlines or "\n" not in item]
    items = [f"{item}{answer_after}{item[::-1]}" if item.strip() else item for item in items]
    text = separator.join([*items, f"b{answer_after}"])
    item_format, tokenizer = ItemFormat(separator, answer_after), CharTokenizer("\n\t =?ab")
    items = item_format.items_of("text", [text])
    split = item_format.as_split(items, tokenizer.encode)
    laid_out = run_node("return layOut(given[0], given[1]);", [text, vars(item_format)])
    ids = tokenizer.encode("".join(laid_out["characters"])).tolist()
    assert ids == split.ids[len(separator) - 1 :].tolist()
    for block_size in (32, 8):
        model = random_model(block_size=block_size, vocab_size=len(tokenizer))
        windows = evaluation_windows(split, block_size, 3)
        nats = exact_loss(model, windows, select_runtime("cpu", "float32"))
        assert run_node(SCORE, packed(model, ids) | laid_out) == pytest.approx(nats, abs=1e-5)


def test_the_induction_share_of_a_head_is_its_attention_to_what_followed_the_last_two_characters():
    ids, model = np.random.default_rng(4).integers(0, 3, 64).tolist(), random_model(block_size=64)
    code = """
    const [model, shares] = [modelOf(given), []];
    for (const [n] of readWindow(model, given.ids, 0, given.ids.length)) {
      shares.push(headShares(given.ids, n - 1, model.attention).induction);
    }
    return meanShares(shares);
    """
    found = run_node(code, packed(model, ids))
    maps = torch.cat(attention_maps(model, torch.tensor(ids))).numpy()  # (L * H, T, T)
    sums, uniform = [], []
    for p in range(64):
        after = [j + 1 for j in range(1, p) if ids[j - 1 : j + 1] == ids[p - 1 : p + 1]]
        if after:
            sums.append(maps[:, p, after].sum(axis=1))
            uniform.append(len(after) / (p + 1))
    assert_close(found["heads"], np.mean(sums, axis=0), 1e-5)
    assert found["uniform"] == pytest.approx(np.mean(uniform))


@pytest.mark.parametrize("length", [2, 65, 300])
def test_a_score_is_the_exact_loss(trained, length):
    path, model, _ = trained
    ids = np.random.default_rng(length).integers(0, model.vocab_size, length)
    windows = evaluation_windows(Split(ids, ((0, length),)), model.config.block_size, 3)
    nats = exact_loss(model, windows, select_runtime("cpu", "float32"))
    found = run_node(SCORE, given_of(path) | {"ids": ids.tolist()})
    assert found == pytest.approx(nats, abs=1e-5)


def test_the_page_checks_itself_against_the_logits_of_the_model(trained):
    """After a single token, after a whole context, and where the window has moved."""
    path, model, _ = trained
    given = given_of(path)
    check = "return Array.from(differences(modelOf(given), given.check));"
    assert max(run_node(check, given)) < 1e-5
    ids, expected = given["check"]["ids"], given["check"]["logits"]
    assert [n for n, _ in expected] == [1, 64, 65]
    for n, logits in expected:
        assert_close(logits, logits_of(model, ids[window_start(n, 64) : n])[-1], 1e-4)


# ----------------------------------------------------------------------------------------- sampling


def test_random_numbers_are_those_of_numpy():
    rng = np.random.default_rng(6)
    pairs = [(0, 0), (2**32 - 1, 10**12), *rng.integers(0, [2**32, 10**12], (998, 2)).tolist()]
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


def test_the_page_holds_the_facts_and_names_no_path(trained, smoke):
    path, model, vocabulary = trained
    text = path.read_text(encoding="utf-8")
    data = json.loads(parts_of(text)["data"])
    assert data["vocabulary"] == vocabulary and data["prompt"] == "KING"
    about = data["about"]
    assert about["parameters"] == parameter_count(model) and about["text"] == "plays"
    assert about["steps"] == about["loss_step"] == 60 and 0 < about["loss"] < 5
    for secret in (str(smoke.parent), str(ROOT), os.path.expanduser("~")):
        assert secret not in text


def test_the_page_fetches_nothing_and_allows_no_other_code(trained):
    text = trained[0].read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy
    body = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"\bstyle=|\bon\w+=|(src|href)=\"(?!data:|#)|https?:", body)


HOSTILE = "\x00\x07\t\n\r\x1b !\"'&<>/\\`${}ab\x7f\u200b\u202e\u2028\ufffd\u05d0\U0001f600"


def test_hostile_strings_stay_data(tmp_path):
    model, page = random_model(vocab_size=len(HOSTILE)), tmp_path / "page.html"
    data = TextInfo(name="/home/somebody/</script><!--<script>\u2028\"'`{{weights}}\x1b[2J")
    path = save_model(tmp_path / "hostile.safetensors", model, HOSTILE, text=data)
    prompt = "".join(c for c in "</script><b>\u2028\u202e\"'{{}}" if c in HOSTILE)
    sample_main([f"--ckpt={path}", f"--html={page}", f"--prompt={prompt}"])
    parts = parts_of(page.read_text(encoding="utf-8"))
    data = json.loads(parts["data"])
    assert data["vocabulary"] == HOSTILE and data["prompt"] == prompt
    assert not set("<\u2028\u202e\x1b") & set(parts["data"])
    assert parts["model-code"] == export.read("model.js") and "somebody" not in page.read_text()


def test_a_character_has_the_same_name_in_python_and_in_the_page():
    names = {"\n": "newline", "\t": "tab", " ": "space", "\r": "U+000D", "\x1b": "U+001B"}
    names |= {c: c for c in "aé中ب\U0001f600\ufffd~"}
    blank = "\u00a0\u3000\u00ad\u200b\u200d\u202e\u2028\ufe0f\u0301\u0903\u115f\u2800\ue000"
    names |= {c: f"U+{ord(c):04X}" for c in (*blank, "\U000e0067")}
    assert {character: character_name(character) for character in names} == names
    assert run_node("return given.map(characterName);", [*names]) == [*names.values()]
    # in a text, joiners and marks do their work, and controls do nothing
    assert run_node("return given.map(inText);", [*"\n\u200d\u0301\u202e\x1b"]) == [
        *"\n\u200d\u0301", "U+202E", "U+001B"
    ]  # fmt: skip


def test_the_page_in_docs_is_of_the_present_code_and_knows_the_plays():
    """Its model comes from

    python train.py configs/fast.yaml --data.sources=data/plays --block_size=128 --max_iters=1000 \\
        --warmup_ratio=0.05 --cooldown_ratio=0.9 --learning_rate=0.02 \\
        --muon_learning_rate=0.02 --muon_momentum=0.9 --eval_interval=250 --out_dir=out/plays
    python sample.py --ckpt out/plays --html docs/plays.html
    """
    path = ROOT / "docs" / "plays.html"
    page = path.read_bytes()
    assert len(page) < 2_500_000
    refreshed = export.refresh(page.decode()).decode()
    logits = re.compile(r'"check": \{.*?\}')  # their last digits depend on the CPU
    assert logits.sub("", refreshed) == logits.sub("", page.decode()), (
        "run: python -m page.export docs/plays.html"
    )
    text = (ROOT / "data" / "plays" / "orchard.txt").read_text()[-2000:]  # it did not train on it
    given = given_of(path)
    ids = [given["vocabulary"].index(character) for character in text]
    assert run_node(SCORE, given | {"ids": ids}) < 1.35


# -------------------------------------------------------------------------------------- user errors


def test_a_page_of_ours_is_replaced_and_another_file_is_left_alone(smoke, tmp_path):
    path = tmp_path / "page.html"
    words = [f"--ckpt={smoke}", f"--html={path}"]
    assert sample_main(words) == 0
    assert sample_main([*words, "--prompt=another"]) == 0
    assert "another" in path.read_text()
    before = path.read_bytes()
    assert sample_main([*words, "--prompt=another", "--dtype=bfloat16"]) == 0
    assert path.read_bytes() == before  # pages are in float32
    path.write_text("no page")
    with pytest.raises(ConfigError, match="exists, and is not a Hornbook page"):
        sample_main(words)
    assert path.read_text() == "no page"


def test_a_path_that_cannot_be_written_is_one_line_with_code_5(smoke, tmp_path, capsys):
    path = tmp_path / "no" / "such" / "folder" / "page.html"
    assert exit_code(sample_main, [f"--ckpt={smoke}", f"--html={path}"]) == 5
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())
