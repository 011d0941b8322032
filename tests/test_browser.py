"""The page in headless Chromium, opened from a file: every section does what it says, nothing is
requested and nothing reaches the console.
"""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import sync_playwright

from checkpointing import checkpoint
from data.batches import Split, evaluation_windows
from data.tokenizer import CharTokenizer
from model.generate import Generation, Sampler, window_start
from model.gpt import MLP
from model.runtime import select_runtime
from tests.commands import sample_main
from tests.hostile import HOSTILE, hostile_checkpoint
from tests.test_page import random_model
from tests.variants import RECIPES, choices_of, concatenated
from training.evaluate import exact_loss

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
WAIT = 60  # seconds


@pytest.fixture(scope="module")
def browser():
    """The Chromium of the machine, or else the one that `playwright install` has installed."""
    with sync_playwright() as playwright:
        if not CHROMIUM and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium here; .ci/browser installs one")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def smoke_page(smoke, tmp_path_factory):
    """The page of the trained model, whose context is 64."""
    path = tmp_path_factory.mktemp("pages") / "smoke.html"
    sample_main([f"--ckpt={smoke}", f"--html={path}", "--prompt=KING", "--max-new-tokens=150"])
    return path


class Tab:
    """An open page, with all that it requested and logged.

    Unless `alive`, the text that it writes by itself is thrown away.
    """

    def __init__(self, browser, path: Path, alive=False, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
        context.set_default_timeout(1000 * WAIT)
        self.page, self.logged, self.requested = context.new_page(), [], []
        self.page.on("console", lambda message: self.logged.append(message.text))
        self.page.on("pageerror", lambda error: self.logged.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(path.as_uri())
        if not alive and options.get("java_script_enabled", True):
            self.page.click("#restart")

    def __getattr__(self, name):
        return getattr(self.page, name)

    def until(self, expression: str):
        """Wait for an expression to be true: here, as the page allows no evaluation there."""
        end = time.monotonic() + WAIT
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"not within {WAIT} s: {expression}"
            self.page.wait_for_timeout(20)

    def text(self) -> str:
        """The text that the page shows, without its marks."""
        return self.page.text_content("#text")

    def write(self):
        """Write the whole text."""
        self.page.click("#write")
        self.until("document.querySelector('#write').textContent === 'Continue'")

    def select(self, i: int, box: str = "#text"):
        self.page.locator(f"{box} span").nth(i).click()

    def levels(self) -> list[int]:
        """The colors of the text, but for its first character: levels of loss."""
        names = self.page.evaluate(
            "Array.from(document.querySelectorAll('#text span')).map((span) => span.className)"
        )
        return [int(re.search(r"n(\d)", name)[1]) for name in names[1:]]

    def inspected(self):
        self.until("document.querySelector('#attention').ariaBusy === 'false'")


class Recipe:
    """The page of a small model with the choices of a recipe, and what Python computes with it."""

    VOCABULARY = "\n abcdefghi"

    def __init__(self, smoke, folder: Path, recipe: str):
        self.model, self.page = random_model(10.0, **choices_of(recipe)), folder / "page.html"
        saved = checkpoint.load(smoke / "best.safetensors")
        tensors = concatenated(self.model.named_slices())
        saved = dataclasses.replace(
            saved,
            config=dataclasses.replace(saved.config, model=self.model.config),
            vocabulary=self.VOCABULARY,
            tensors={f"model.{name}": tensor for name, tensor in tensors.items()},
        )
        (folder / "model.safetensors").write_bytes(checkpoint.to_bytes(saved))
        options = [f"--html={self.page}", "--prompt=abc", "--max-new-tokens=20"]
        sample_main([f"--ckpt={folder / 'model.safetensors'}", *options])

    def lens(self, text: str, n: int) -> torch.Tensor:
        """The probabilities (L, V) of character n after each block."""
        window = text[window_start(n, self.model.config.block_size) : n]
        ids = torch.tensor([self.VOCABULARY.index(character) for character in window])
        return self.model.logit_lens(ids)[:, -1].double().softmax(-1)

    def nats(self, text: str) -> list[float]:
        rows = ((n, self.VOCABULARY.index(text[n])) for n in range(1, len(text)))
        return [-self.lens(text, n)[-1, id].log().item() for n, id in rows]


@pytest.fixture
def tab(browser, smoke_page):
    opened = Tab(browser, smoke_page)
    yield opened
    assert opened.logged == [] and [url for url in opened.requested if "blob:" not in url] == [
        smoke_page.as_uri()
    ]
    opened.page.context.close()


@pytest.fixture(scope="module")
def trained(smoke):
    saved = checkpoint.load(smoke / "best.safetensors")
    return checkpoint.build_model(saved).eval(), CharTokenizer(saved.vocabulary)


def continued(trained, text: str, length: int) -> str:
    """Continue a text with sample.py and the page's first settings, to so many characters."""
    model, tokenizer = trained
    generation = Generation(model, Sampler(1337, temperature=0.8))
    generation.append(tokenizer.encode(text)[None])
    steps = [generation.step() for _ in range(length - len(text))]
    return text + "".join(tokenizer.decode(step) for step in steps)


# ------------------------------------------------------------------------------------------ opening


def test_the_page_opens_alive_and_shows_the_first_surprising_character(
    browser, smoke_page, trained
):
    opened = Tab(browser, smoke_page, alive=True)
    opened.until("document.querySelector('#text .selected')")
    opened.inspected()
    length = len(opened.text())
    assert "characters/s" not in opened.text_content("#status")  # at a pace that one can follow
    assert opened.text_content("#write") == "Pause" and 4 < length < 154
    losses = opened.evaluate(
        "Array.from(document.querySelectorAll('#text span')).slice(4)"
        ".map((span) => Number(span.className.match(/n(\\d)/)[1]))"
    )
    selected = opened.evaluate(
        "Array.from(document.querySelectorAll('#text span')).slice(4)"
        ".findIndex((span) => span.classList.contains('selected'))"
    )
    assert losses[selected] >= 2 and max(losses[:selected], default=0) <= 2  # ln 10 = 2.3
    p = float(re.search(r"probability ([\d.]+)", opened.text_content("#why"))[1])
    assert p < 10 and opened.locator("#lens tbody tr").count() == 2
    opened.keyboard.press("Shift")  # a key takes over
    assert opened.text_content("#write") == "Continue"
    length = len(opened.text())
    opened.wait_for_timeout(200)
    assert len(opened.text()) == length
    opened.write()
    assert opened.text() == continued(trained, "KING", 154)
    opened.context.close()


def test_with_reduced_motion_the_whole_text_is_written_at_once(browser, smoke_page, trained):
    opened = Tab(browser, smoke_page, alive=True, reduced_motion="reduce")
    opened.until("document.querySelector('#write').textContent === 'Continue'")
    assert opened.text() == continued(trained, "KING", 154)
    rate = int(
        re.search(r"([\d,]+) characters/s", opened.text_content("#status"))[1].replace(",", "")
    )
    assert rate > 40 and opened.locator("#text .selected").count() == 1
    opened.context.close()


def test_a_page_that_is_not_pythons_model_says_so(
    browser, smoke, smoke_page, tmp_path, monkeypatch
):
    mlp, gate = MLP.forward, lambda x: 1 + 0.1 * x[..., :1].tanh()
    monkeypatch.setattr(MLP, "forward", lambda layer, x: gate(x) * mlp(layer, x))
    sample_main([f"--ckpt={smoke}", f"--html={tmp_path / 'gated.html'}"])
    opened = Tab(browser, tmp_path / "gated.html", alive=True)
    opened.until("!document.querySelector('#failure').hidden")
    assert "is not the model that was trained" in opened.text_content("#failure")
    opened.goto(smoke_page.as_uri())
    opened.write()
    opened.wait_for_timeout(500)
    assert not opened.is_visible("#failure")
    opened.context.close()


# -------------------------------------------------------------------------------------------- write


def test_it_writes_what_sample_py_writes_past_the_window(tab, trained):
    tab.write()
    assert tab.text() == continued(trained, "KING", 154)
    status = tab.text_content("#status")
    assert status.startswith("154 characters · ") and "characters/s · mean loss" in status
    marked = tab.evaluate(
        "Array.from(document.querySelectorAll('#text span'))"
        ".map((span) => span.className).map((name, i) => [name, i])"
    )
    assert [i for name, i in marked if "window-start" in name] == [96]
    assert [i for name, i in marked if "before-window" in name] == list(range(96))
    assert [i for name, i in marked if "given" in name] == [0, 1, 2, 3]


def test_it_pauses_continues_steps_and_starts_over(tab, trained):
    tab.fill("#max_new_tokens", "10000")
    tab.click("#write")
    tab.until("document.querySelectorAll('#text span').length > 40")
    assert tab.text_content("#write") == "Pause"
    tab.click("#write")
    length = len(tab.text())
    tab.wait_for_timeout(300)
    assert len(tab.text()) == length < 10_000
    tab.click("#step")
    tab.until(f"document.querySelectorAll('#text span').length === {length + 1}")
    tab.click("#write")
    tab.until(f"document.querySelectorAll('#text span').length > {length + 40}")
    tab.click("#write")
    text = tab.text()
    assert text == continued(trained, "KING", len(text))
    tab.click("#restart")
    assert tab.text() == "" and tab.text_content("#write") == "Write"
    tab.click("#step")
    tab.until("document.querySelectorAll('#text span').length === 5")
    assert tab.text() == text[:5]


def test_an_empty_prompt_begins_as_in_sample_py(tab, trained):
    tab.fill("#prompt", "")
    tab.fill("#max_new_tokens", "30")
    tab.write()
    assert tab.text() == continued(trained, "\n", 31)
    assert tab.evaluate("document.querySelector('#text span').hidden")


def test_unknown_characters_are_named_and_removed_on_request(tab):
    tab.fill("#prompt", "KI\xe9N\u202eG\xe9")
    tab.click("#write")
    assert tab.inner_text("#prompt-error").startswith(
        "The model has never read ‘\xe9’ (U+00E9), ‘\\u202e’ (U+202E)."
    )
    assert tab.text() == ""
    tab.click("#prompt-error button")
    assert tab.input_value("#prompt") == "KING" and not tab.is_visible("#prompt-error")


def test_the_text_is_copied_without_its_marks(browser, smoke_page):
    copied = Tab(browser, smoke_page, permissions=["clipboard-read", "clipboard-write"])
    copied.write()
    copied.click("#copy")
    copied.until("document.querySelector('#status').textContent.startsWith('Copied 154')")
    assert copied.evaluate("navigator.clipboard.readText()") == copied.text()
    copied.context.close()


def test_nothing_moves_while_it_writes(tab):
    places = "Array.from(document.querySelectorAll('section')).map((s) => s.offsetTop).join()"
    tab.fill("#max_new_tokens", "2000")
    before = tab.evaluate(places)
    tab.click("#write")
    tab.until("document.querySelectorAll('#text span').length > 1500")
    assert tab.evaluate(places) == before


# ---------------------------------------------------------------------------------------------- why


def test_each_character_shows_its_probability_and_the_likeliest_instead(tab, trained):
    tab.write()
    model, tokenizer = trained
    text = tab.text()
    with torch.inference_mode():
        ids = torch.from_numpy(tokenizer.encode(text[:40]).astype(np.int64))[None]
        probs = model(ids)[0, -1].double().softmax(0)
    likeliest = probs.argsort(descending=True)[:5].tolist()
    tab.locator("#text span").nth(40).hover()
    p = probs[tokenizer.encode(text[40])[0]].item()
    assert f"probability {100 * p:.1f}\xa0%, loss {-np.log(p):.2f} nats" in tab.inner_text("#why")
    shares = tab.locator("#why .share").all_inner_texts()
    assert shares[:5] == [f"{100 * probs[i]:.1f}\xa0%" for i in likeliest]
    assert tab.locator("#why button").count() == 5 + (
        tokenizer.encode(text[40])[0] not in likeliest
    )
    assert tab.locator("#why .taken").count() == 1
    class_name = tab.locator("#text span").nth(40).get_attribute("class")
    assert f"n{min(7, int(-np.log(p)))}" in class_name


def test_another_character_continues_the_text_with_the_same_random_numbers(tab, trained):
    tab.write()
    text = tab.text()
    tab.select(40)
    button = tab.locator("#why button:not([disabled])").first
    name = button.locator(".name").inner_text()
    character = {"newline": "\n", "space": " "}.get(name, name)
    button.click()
    tab.until("document.querySelector('#write').textContent === 'Continue'")
    changed = text[:40] + character
    found = continued(trained, changed, 154)
    assert character != text[40] and tab.text() == found
    assert tab.evaluate("document.activeElement.id") == "text"


def test_the_alternatives_can_be_chosen_while_it_writes(tab):
    tab.fill("#max_new_tokens", "10000")
    tab.click("#write")
    tab.until("document.querySelectorAll('#text span').length > 30")
    tab.evaluate("document.querySelectorAll('#text span')[20].click()")
    tab.evaluate("window.first = document.querySelector('#why button')")
    length = len(tab.text())
    tab.until(f"document.querySelectorAll('#text span').length > {length + 50}")
    assert tab.evaluate("window.first === document.querySelector('#why button')")


def test_the_keyboard_reaches_every_character(tab):
    tab.write()
    tab.focus("#text")
    selected = "Array.from(document.querySelectorAll('#text span'))" + (
        ".findIndex((span) => span.classList.contains('selected'))"
    )
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate(selected) == 153
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate(selected) == 152
    tab.keyboard.press("Home")
    assert tab.evaluate(selected) == 0 and "no prediction" in tab.inner_text("#why")
    tab.keyboard.press("ArrowDown")
    assert 0 < tab.evaluate(selected) < 154
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate(selected) == 0
    tab.keyboard.press("Escape")
    assert tab.evaluate(selected) == -1
    for control in ("#prompt", "#write", "#step", "#copy", "#layer", "#score-text", "#score"):
        assert tab.evaluate(f"document.querySelector('{control}').tabIndex") == 0


# ---------------------------------------------------------------------------------------- attention


def test_the_window_is_shaded_by_the_attention_of_the_chosen_head(tab, trained):
    tab.write()
    model, tokenizer = trained
    text = tab.text()
    tab.select(140)
    tab.inspected()
    window = text[96:140]  # of the 140 characters before, the model sees those from 96 on
    assert tab.text_content("#window") == window
    ids = torch.from_numpy(tokenizer.encode(window).astype(np.int64))
    maps = model.attention_maps(ids)
    for layer, head in ((1, 0), (0, 1)):
        tab.select_option("#layer", index=layer)
        tab.select_option("#head", index=head)
        row = maps[layer][head, -1]
        found = tab.evaluate(
            "Array.from(document.querySelectorAll('#window span'))"
            ".map((span) => Number(span.style.getPropertyValue('--weight')))"
        )
        assert np.allclose(found, row / row.max(), atol=1e-4)
        for h, cells in enumerate(tab.locator("#heads tr").all()):
            mean = maps[layer][h].diagonal(-1).mean()
            uniform = (1 / np.arange(2, 45)).mean()
            assert f"{100 * mean:.1f}\xa0% ({100 * uniform:.1f}\xa0%)" in cells.inner_text()
    tab.click("#heads tr:first-child button")
    assert tab.input_value("#head") == "0"
    assert "none in this text" in tab.text_content("#verdict")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_lens_and_the_heads_that_are_off_are_pythons(browser, smoke, tmp_path, recipe):
    python = Recipe(smoke, tmp_path, recipe)
    opened, n = Tab(browser, python.page), 10
    opened.write()
    text = opened.text()

    def shown():
        """What the page shows of character n, and the levels of all."""
        opened.inspected()
        rows = opened.locator("#lens tbody tr td:last-child").all_inner_texts()
        return (
            rows,
            re.search(r"probability (\S+\s%)", opened.inner_text("#why"))[1],
            opened.levels(),
        )

    def expected():
        shares = python.lens(text, n)[:, python.VOCABULARY.index(text[n])].tolist()
        shares = [f"{100 * p:.{3 if p < 0.001 else 1}f}\xa0%" for p in shares]
        return shares, shares[-1], [min(7, int(nats)) for nats in python.nats(text)]

    opened.select(n)
    assert shown() == expected()
    chips = [
        cells.split() for cells in opened.locator("#lens tbody td:nth-child(2)").all_inner_texts()
    ]
    best = python.lens(text, n).argmax(-1).tolist()
    names = {"\n": "↵", " ": "␣"}
    assert [row[0] for row in chips] == [
        names.get(c, c) for c in map(python.VOCABULARY.__getitem__, best)
    ]

    with_all = shown()
    opened.select_option("#layer", index=0)
    opened.focus("#heads tr:nth-child(2) input")
    opened.keyboard.press("Space")
    opened.until("document.querySelector('#off-effect').textContent.includes('Changed most')")
    assert opened.text_content("#off-names") == "Switched off: layer 1 head 2."
    with python.model.heads_off([(0, 1)]):
        assert shown() == expected() != with_all
        assert opened.evaluate("document.activeElement.ariaLabel") == "Use head 2"
        means = re.findall(r"\d\.\d{4}", opened.text_content("#off-effect"))
        assert float(means[1]) == pytest.approx(np.mean(python.nats(text)), abs=1e-4)
        opened.fill("#score-text", text)
        opened.click("#score")
        opened.until("document.querySelector('#score-result').textContent.includes('1 head off')")
        opened.click("#step")  # the next character
        opened.until(f"document.querySelectorAll('#text span').length === {len(text) + 1}")
        text = opened.text()
        assert opened.levels()[-1] == min(7, int(python.nats(text)[-1]))
        text = text[:-1]
    assert float(means[0]) == pytest.approx(np.mean(python.nats(text)), abs=1e-4)
    opened.click("#all-on")
    opened.inspected()
    assert not opened.is_visible("#heads-off")
    opened.until("document.querySelector('#off-effect').textContent.includes('Changed most')")
    assert shown()[:2] == with_all[:2] and opened.levels()[: len(text) - 1] == with_all[2]
    opened.context.close()


def test_a_long_text_has_its_colors_again_when_all_heads_are_on_again(tab):
    """It is judged in many slices of time, some of which end in what is only context."""
    tab.fill("#max_new_tokens", "1500")
    tab.write()
    tab.select(1400)
    tab.inspected()
    first, effects = tab.levels(), []
    for switch in ("#heads tr:first-child input", "#all-on"):
        tab.click(switch)
        tab.until("document.querySelector('#off-effect').textContent.includes('Changed most')")
        effect = tab.text_content("#off-effect").split("Changed most: ")[1]
        effects.append(re.fullmatch(r"(.*): (.*) → (.*)\.", effect).groups())
        assert (tab.levels() == first) == (switch == "#all-on")
    (place, was, now), (same_place, *again) = effects
    assert place == same_place and [now, was] == again
    assert re.search("“(.*)”", place)[1].replace("\\n", "\n") in tab.text()


def test_the_first_character_was_not_chosen(tab):
    tab.write()
    tab.select(0)
    assert "was given" in tab.text_content("#attention-status")


# -------------------------------------------------------------------------------------------- score


def test_a_score_is_the_exact_loss(tab, trained):
    model, tokenizer = trained
    text = "So it is, and so it was.\n" * 20
    ids = tokenizer.encode(text)
    windows = evaluation_windows(Split(ids, ((0, len(ids)),)), 64, 7)
    nats = exact_loss(model, windows, select_runtime("cpu", "float32"))
    tab.fill("#score-text", text)
    tab.click("#score")
    tab.until("document.querySelector('#score').textContent === 'Score'")
    assert tab.text_content("#score-result") == (
        f"{nats:.4f} nats, {nats / np.log(2):.4f} bits per character, over 499 predictions"
    )
    assert tab.text_content("#scored") == text
    assert tab.locator("#scored span[class*=n]").count() >= 499
    tab.select(100, "#scored")
    assert "probability" in tab.inner_text("#score-why")


def test_a_score_is_cancelled_and_a_text_too_short_refused(tab):
    tab.fill("#score-text", "So it is, and so it was.\n" * 400)
    tab.click("#score")
    tab.until("document.querySelector('#score-result').textContent.endsWith('so far')")
    tab.click("#score")
    assert tab.text_content("#score-result") == "Cancelled."
    tab.fill("#score-text", "S")
    tab.click("#score")
    assert tab.text_content("#score-result") == "At least 2 characters are needed."


# ------------------------------------------------------------------------------------------ strings


def test_hostile_strings_do_no_harm_and_are_shown_escaped(browser, smoke, tmp_path):
    path, page = hostile_checkpoint(smoke, tmp_path), tmp_path / "page.html"
    sample_main([f"--ckpt={path}", f"--html={page}", "--prompt=</\u202e\u2028\"'>", "--seed=3"])
    opened = Tab(browser, page)
    opened.write()
    shown = opened.text()
    assert shown.startswith("</\\u202e\\u2028\"'>")
    harmless = set(HOSTILE) - set("\x00\x07\r\x1b\x7f\u200b\u202e\u2028")
    assert set(shown) <= harmless | set("\\x0123456789abcdefru")
    assert len(set(shown)) > 20
    about = opened.text_content("#facts")
    assert "script><!--<script>" in about and "\\x1b[2J" in about and "somebody" not in about
    opened.select(300)
    opened.inspected()
    opened.fill("#score-text", "".join(sorted(set(HOSTILE) - set("\r\x00"))))
    opened.click("#score")
    opened.until("document.querySelector('#score').textContent === 'Score'")
    assert "over" in opened.text_content("#score-result")
    assert (
        opened.logged == []
        and opened.locator("b, iframe, img, body > script:not([id])").count() == 0
    )
    assert [url for url in opened.requested if "blob:" not in url] == [page.as_uri()]
    opened.context.close()


def test_without_javascript_the_page_says_what_it_needs(browser, smoke_page):
    opened = Tab(browser, smoke_page, java_script_enabled=False)
    assert "needs JavaScript" in opened.inner_text("noscript")
    assert not opened.is_visible("main")
    opened.context.close()


def test_on_a_phone_a_tap_brings_the_explanation_into_view(browser, smoke_page):
    opened = Tab(browser, smoke_page, viewport={"width": 390, "height": 844}, has_touch=True)
    opened.write()
    opened.locator("#text span").nth(40).tap()
    opened.until(
        "(() => { const { top, bottom } = document.querySelector('#why').getBoundingClientRect();"
        "return top > 0 && bottom <= innerHeight + 1; })()"
    )
    opened.wait_for_timeout(300)
    place = opened.locator("#text span").nth(40).bounding_box()
    assert 0 < place["y"] < 844  # the character is in view, too
    assert "temperature 1; the text is drawn at temperature 0.8" in opened.text_content("#why")
    opened.context.close()


@pytest.mark.parametrize("width", [360, 1600])
def test_nothing_is_wider_than_the_viewport(browser, smoke_page, width):
    opened = Tab(browser, smoke_page, viewport={"width": width, "height": 800})
    opened.write()
    opened.select(140)
    opened.inspected()
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    opened.context.close()


def test_code_that_is_not_the_pages_own_does_not_run(browser, smoke_page, tmp_path):
    page = smoke_page.read_text(encoding="utf-8")
    changed = page.replace("</body>", "<script>document.title = 'run'</script></body>")
    (tmp_path / "changed.html").write_text(changed, encoding="utf-8")
    opened = Tab(browser, tmp_path / "changed.html")
    opened.write()
    assert opened.title() == "plays: a GPT in a page" and "Content Security" in opened.logged[0]
    assert json.loads(opened.text_content("#data"))["prompt"] == "KING"
    opened.context.close()
