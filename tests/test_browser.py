"""The page in headless Chromium, opened from a file: every section does what it says, nothing is
requested and nothing reaches the console.
"""

import json
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
from model.generate import Generation, Sampler
from model.runtime import select_runtime
from tests.commands import sample_main
from tests.hostile import HOSTILE, hostile_checkpoint
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
    """An open page, with all that it requested and logged."""

    def __init__(self, browser, path: Path, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
        context.set_default_timeout(1000 * WAIT)
        self.page, self.logged, self.requested = context.new_page(), [], []
        self.page.on("console", lambda message: self.logged.append(message.text))
        self.page.on("pageerror", lambda error: self.logged.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(path.as_uri())

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

    def inspected(self):
        self.until("!document.querySelector('#attention').hidden")


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
