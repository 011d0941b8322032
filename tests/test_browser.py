"""The page in headless Chromium, opened from a file: every section does what it says, nothing is
requested and nothing reaches the console.
"""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import sync_playwright

from checkpointing import checkpoint
from data.batches import Split, evaluation_windows
from data.tokenizer import CharTokenizer
from model.generate import window_start
from model.gpt import MLP
from model.inspect import attention_maps, heads_off, logit_lens
from model.runtime import select_runtime
from tests.commands import sample_main
from tests.conftest import CHROMIUM
from tests.runs import train
from tests.test_page import random_model
from tests.variants import RECIPES, choices_of, save_model
from training.evaluate import exact_loss

WAIT = 60  # seconds
SPANS = "Array.from(document.querySelectorAll('#text span'))"  # the characters of the text
SELECTED = "span.classList.contains('selected')"


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

    def until_says(self, box: str, words: str):
        self.until(f"document.querySelector('{box}').textContent.includes('{words}')")

    def until_inspected(self):
        self.until("document.querySelector('#attention').ariaBusy === 'false'")

    def text(self) -> str:
        """The text that the page shows, without its marks."""
        return self.page.text_content("#text")

    def write(self):
        """Write the whole text."""
        self.page.click("#write")
        self.until_says("#write", "Continue")

    def write_until(self, length: int):
        """Begin to write a text of 10,000 characters; return when it is longer than `length`."""
        self.page.fill("#max_new_tokens", "10000")
        self.page.click("#write")
        self.until(f"{SPANS}.length > {length}")

    def select(self, i: int, box: str = "#text"):
        self.page.locator(f"{box} span").nth(i).click()

    def levels(self) -> list[int]:
        """The colors of the text, but for its first character: levels of loss."""
        names = self.page.evaluate(f"{SPANS}.map((span) => span.className)")
        return [int(re.search(r"n(\d)", name)[1]) for name in names[1:]]


@pytest.fixture
def open_tab(browser):
    """A function that opens a page; no page may log anything or request more than its file."""
    tabs = []

    def open_tab(path, **options):
        tabs.append((path.as_uri(), Tab(browser, path, **options)))
        return tabs[-1][1]

    yield open_tab
    for address, tab in tabs:
        assert tab.logged == []
        assert [url for url in tab.requested if "blob:" not in url] == [address]
        tab.context.close()


@pytest.fixture
def tab(open_tab, smoke_page):
    return open_tab(smoke_page)


@pytest.fixture(scope="module")
def trained(smoke):
    saved = checkpoint.load(smoke / "best.safetensors")
    return checkpoint.build_model(saved).eval(), CharTokenizer(saved.vocabulary)


@pytest.fixture
def continued(smoke, capsys):
    """A function that continues a text to so many characters, with sample.py's first settings."""

    def continued(text: str, length: int) -> str:
        words = [f"--prompt={text}", f"--max-new-tokens={length - len(text)}", "--device=cpu"]
        assert sample_main([f"--ckpt={smoke}", *words]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return continued


# ------------------------------------------------------------------------------------------ opening


def test_the_page_opens_alive_and_shows_the_first_surprising_character(
    open_tab, smoke_page, continued
):
    opened = open_tab(smoke_page, alive=True)
    opened.until("document.querySelector('#text .selected')")
    opened.until_inspected()
    assert "characters/s" not in opened.text_content("#status")  # at a pace that one can follow
    assert opened.text_content("#write") == "Pause" and 4 < len(opened.text()) < 154
    losses = opened.levels()[3:]  # of those that it drew
    selected = opened.evaluate(f"{SPANS}.slice(4).findIndex((span) => {SELECTED})")
    assert losses[selected] >= 2 and max(losses[:selected], default=0) <= 2  # ln 10 = 2.3
    p = float(re.search(r"probability ([\d.]+)", opened.text_content("#why"))[1])
    assert p < 10 and opened.locator("#lens tbody tr").count() == 2
    opened.keyboard.press("Shift")  # a key takes over
    assert opened.text_content("#write") == "Continue"
    length = len(opened.text())
    opened.wait_for_timeout(200)
    assert len(opened.text()) == length
    opened.write()
    assert opened.text() == continued("KING", 154)


def test_with_reduced_motion_the_whole_text_is_written_at_once(open_tab, smoke_page, continued):
    opened = open_tab(smoke_page, alive=True, reduced_motion="reduce")
    opened.until_says("#write", "Continue")
    assert opened.text() == continued("KING", 154)
    rate = re.search(r"([\d,]+) characters/s", opened.text_content("#status"))[1]
    assert int(rate.replace(",", "")) > 40 and opened.locator("#text .selected").count() == 1


def test_a_page_that_is_not_pythons_model_says_so(open_tab, smoke, tmp_path, monkeypatch):
    sample_main([f"--ckpt={smoke}", f"--html={tmp_path / 'plain.html'}"])
    mlp, gate = MLP.forward, lambda x: 1 + 0.1 * x[..., :1].tanh()
    monkeypatch.setattr(MLP, "forward", lambda layer, x: gate(x) * mlp(layer, x))
    sample_main([f"--ckpt={smoke}", f"--html={tmp_path / 'gated.html'}"])
    gated, plain = (open_tab(tmp_path / name, alive=True) for name in ("gated.html", "plain.html"))
    gated.until("!document.querySelector('#failure').hidden")
    assert "is not the model that was trained" in gated.text_content("#failure")
    assert "page/model.js must compute what model/gpt.py does" in gated.text_content("#failure")
    plain.write()
    plain.wait_for_timeout(500)
    assert not plain.is_visible("#failure")


def test_a_page_whose_model_has_other_parameters_names_the_file_to_change(
    open_tab, smoke_page, tmp_path
):
    page = tmp_path / "other.html"
    text = smoke_page.read_text(encoding="utf-8").replace('["final_norm", ', '["last_norm", ')
    page.write_text(text, encoding="utf-8")
    tab = open_tab(page, alive=True)
    tab.until("!document.querySelector('#failure').hidden")
    assert tab.text_content("#failure").startswith("page/model.js cannot run this model: ")
    tab.logged.clear()  # of the browser's own report


# -------------------------------------------------------------------------------------------- write


def test_it_writes_what_sample_py_writes_past_the_window(tab, continued):
    tab.write()
    assert tab.text() == continued("KING", 154)
    status = tab.text_content("#status")
    assert status.startswith("154 characters · ") and "characters/s · mean loss" in status
    names = tab.evaluate(f"{SPANS}.map((span) => span.className)")
    for mark, places in (
        ("window-start", [96]),
        ("before-window", [*range(96)]),
        ("given", [*range(4)]),
    ):
        assert [i for i, name in enumerate(names) if mark in name] == places


def test_it_pauses_continues_steps_and_starts_over(tab, continued):
    tab.write_until(40)
    assert tab.text_content("#write") == "Pause"
    tab.click("#write")
    length = len(tab.text())
    tab.wait_for_timeout(300)
    assert len(tab.text()) == length < 10_000
    tab.click("#step")
    tab.until(f"{SPANS}.length === {length + 1}")
    tab.write_until(length + 40)
    tab.click("#write")
    text = tab.text()
    assert text == continued("KING", len(text))
    tab.click("#restart")
    assert tab.text() == "" and tab.text_content("#write") == "Write"
    tab.click("#step")
    tab.until(f"{SPANS}.length === 5")
    assert tab.text() == text[:5]


def test_an_empty_prompt_begins_as_in_sample_py(tab, continued):
    tab.fill("#prompt", "")
    tab.fill("#max_new_tokens", "30")
    tab.write()
    assert tab.text() == continued("\n", 31)
    assert tab.evaluate(f"{SPANS}[0].hidden")


def test_the_page_of_a_list_writes_item_after_item(open_tab, tmp_path):
    words = ["--separator=\\n", "--data.sources=data/lists/names.txt", "--block_size=8"]
    options = [*words, "--n_embd=32", "--dtype=float32", f"--out_dir={tmp_path / 'run'}"]
    assert train("configs/smoke.yaml", *options)[0] == 0
    page = tmp_path / "names.html"
    sample_main([f"--ckpt={tmp_path / 'run'}", f"--html={page}", "--max-new-tokens=100"])
    opened = open_tab(page)
    assert opened.input_value("#temperature") == "0.7"
    opened.write()
    assert opened.evaluate(f"{SPANS}[0].hidden")  # the end of the item before: no empty first line
    text = opened.text()
    items = text.split("\n")[1:]
    assert len(text) == 101 and len(items) > 5 and max(map(len, items)) > 8 and items[0]


def test_unknown_characters_are_named_and_removed_on_request(tab):
    tab.fill("#prompt", "KI\xe9N\u202eG\xe9")
    tab.click("#write")
    assert tab.inner_text("#prompt-error").startswith(
        "The model has never read ‘\xe9’ (U+00E9), ‘\\u202e’ (U+202E)."
    )
    assert tab.text() == ""
    tab.click("#prompt-error button")
    assert tab.input_value("#prompt") == "KING" and not tab.is_visible("#prompt-error")


def test_the_text_is_copied_without_its_marks(open_tab, smoke_page):
    opened = open_tab(smoke_page, permissions=["clipboard-read", "clipboard-write"])
    opened.write()
    opened.click("#copy")
    opened.until_says("#status", "Copied 154")
    assert opened.evaluate("navigator.clipboard.readText()") == opened.text()


def test_nothing_moves_while_it_writes(tab):
    places = "Array.from(document.querySelectorAll('section')).map((s) => s.offsetTop).join()"
    before = tab.evaluate(places)
    tab.write_until(1500)
    assert tab.evaluate(places) == before


# ---------------------------------------------------------------------------------------------- why


def test_each_character_shows_its_probability_and_the_likeliest_instead(tab, trained):
    tab.write()
    (model, tokenizer), text, levels = trained, tab.text(), tab.levels()
    ids = tokenizer.encode(text[:64]).astype(np.int64)
    with torch.inference_mode():
        rows = model(torch.from_numpy(ids)[None])[0].double().softmax(-1)
    ranks = set()
    for n in (10, 20, 30, 40, 50, 60):
        probs, p = rows[n - 1], rows[n - 1, ids[n]].item()
        order = probs.argsort(descending=True).tolist()
        ranks.add(rank := order.index(ids[n]) + 1)
        tab.locator("#text span").nth(n).hover()
        why = f"probability {100 * p:.1f}\xa0%, loss {-np.log(p):.2f} nats"
        assert why in tab.inner_text("#why") and levels[n - 1] == min(7, int(-np.log(p)))
        shares = tab.locator("#why .share").all_inner_texts()
        shown = order[:5] if rank <= 5 else [*order[:5], ids[n]]
        assert shares == [f"{100 * probs[i]:.1f}\xa0%" for i in shown]
        taken = tab.locator("#why .taken")
        assert taken.get_attribute("title") == f"taken; rank {rank} by probability"
    assert min(ranks) == 1 and max(ranks) > 5


def test_another_character_continues_the_text_with_the_same_random_numbers(tab, continued):
    tab.write()
    text = tab.text()
    tab.select(40)
    button = tab.locator("#why button:not([disabled])").first
    name = button.locator(".name").inner_text()
    character = {"newline": "\n", "space": " "}.get(name, name)
    button.click()
    tab.until_says("#write", "Continue")
    assert character != text[40] and tab.text() == continued(text[:40] + character, 154)
    assert tab.evaluate("document.activeElement.id") == "text"


def test_the_alternatives_can_be_chosen_while_it_writes(tab):
    tab.write_until(30)
    tab.evaluate(f"{SPANS}[20].click()")
    tab.evaluate("window.first = document.querySelector('#why button')")
    tab.until(f"{SPANS}.length > {len(tab.text()) + 50}")
    assert tab.evaluate("window.first === document.querySelector('#why button')")


def test_the_keyboard_reaches_every_character(tab):
    tab.write()
    tab.focus("#text")
    selected = f"{SPANS}.findIndex((span) => {SELECTED})"
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate(selected) == 153
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate(selected) == 152
    tab.keyboard.press("Home")
    assert tab.evaluate(selected) == 0 and "no prediction" in tab.inner_text("#why")
    assert "was given" in tab.text_content("#attention-status")
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
    tab.select(140)
    tab.until_inspected()
    window = tab.text()[96:140]  # of the 140 characters before, the model sees those from 96 on
    assert tab.text_content("#window") == window
    maps = attention_maps(model, torch.from_numpy(tokenizer.encode(window).astype(np.int64)))
    weights = (
        "Array.from(document.querySelectorAll('#window span'))"
        ".map((span) => Number(span.style.getPropertyValue('--weight')))"
    )
    for layer, head in ((1, 0), (0, 1)):
        tab.select_option("#layer", index=layer)
        tab.select_option("#head", index=head)
        row = maps[layer][head, -1]
        assert np.allclose(tab.evaluate(weights), row / row.max(), atol=1e-4)
        for h, cells in enumerate(tab.locator("#heads tr").all()):
            mean = maps[layer][h].diagonal(-1).mean()
            uniform = (1 / np.arange(2, 45)).mean()
            assert f"{100 * mean:.1f}\xa0% ({100 * uniform:.1f}\xa0%)" in cells.inner_text()
    tab.click("#heads tr:first-child button")
    assert tab.input_value("#head") == "0"
    assert "none in this text" in tab.text_content("#verdict")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_lens_and_the_heads_that_are_off_are_pythons(open_tab, tmp_path, recipe):
    model, vocabulary, n = random_model(10.0, **choices_of(recipe)), "\n abcdefghi", 10
    ckpt = save_model(tmp_path / "model.safetensors", model, vocabulary)
    page = tmp_path / "page.html"
    sample_main([f"--ckpt={ckpt}", f"--html={page}", "--prompt=abc", "--max-new-tokens=20"])
    opened = open_tab(page)
    opened.write()
    text = opened.text()

    def lens(text, n):
        """Return the probabilities (L, V) of character n after each layer."""
        window = text[window_start(n, model.config.block_size) : n]
        ids = torch.tensor([vocabulary.index(character) for character in window])
        return logit_lens(model, ids)[:, -1].double().softmax(-1)

    def nats(text):
        rows = ((n, vocabulary.index(text[n])) for n in range(1, len(text)))
        return [-lens(text, n)[-1, id].log().item() for n, id in rows]

    def shown():
        """Return the figures of character n in the page, and the levels of all."""
        opened.until_inspected()
        rows = opened.locator("#lens tbody tr td:last-child").all_inner_texts()
        why = re.search(r"probability (\S+\s%)", opened.inner_text("#why"))[1]
        return rows, why, opened.levels()

    def expected():
        shares = lens(text, n)[:, vocabulary.index(text[n])].tolist()
        shares = [f"{100 * p:.{3 if p < 0.001 else 1}f}\xa0%" for p in shares]
        return shares, shares[-1], [min(7, int(loss)) for loss in nats(text)]

    opened.select(n)
    with_all = shown()
    assert with_all == expected()
    chips = opened.locator("#lens tbody td:nth-child(2)").all_inner_texts()
    likeliest = [vocabulary[i] for i in lens(text, n).argmax(-1)]
    names = {"\n": "↵", " ": "␣"}
    assert [cell.split()[0] for cell in chips] == [names.get(c, c) for c in likeliest]

    # one head off
    opened.select_option("#layer", index=0)
    opened.focus("#heads tr:nth-child(2) input")
    opened.keyboard.press("Space")
    opened.until_says("#off-effect", "Changed most")
    assert opened.text_content("#off-names") == "Switched off: layer 1 head 2."
    with heads_off(model, [(0, 1)]):
        assert shown() == expected() != with_all
        assert opened.evaluate("document.activeElement.ariaLabel") == "Use head 2"
        means = re.findall(r"\d\.\d{4}", opened.text_content("#off-effect"))
        assert float(means[1]) == pytest.approx(np.mean(nats(text)), abs=1e-4)
        opened.fill("#score-text", text)
        opened.click("#score")
        opened.until_says("#score-result", "1 head off")
        opened.click("#step")  # the next character
        opened.until(f"{SPANS}.length === {len(text) + 1}")
        assert opened.levels()[-1] == min(7, int(nats(opened.text())[-1]))
    assert float(means[0]) == pytest.approx(np.mean(nats(text)), abs=1e-4)

    # all on again
    opened.click("#all-on")
    opened.until_inspected()
    assert not opened.is_visible("#heads-off")
    opened.until_says("#off-effect", "Changed most")
    assert shown()[:2] == with_all[:2] and opened.levels()[: len(text) - 1] == with_all[2]


def test_a_long_text_has_its_colors_again_when_all_heads_are_on_again(tab):
    """It is judged in many slices of time, some of which end in what is only context."""
    tab.fill("#max_new_tokens", "1500")
    tab.write()
    tab.select(1400)
    tab.until_inspected()
    first, effects = tab.levels(), []
    for switch in ("#heads tr:first-child input", "#all-on"):
        tab.click(switch)
        tab.until_says("#off-effect", "Changed most")
        effect = tab.text_content("#off-effect").split("Changed most: ")[1]
        effects.append(re.fullmatch(r"(.*): (.*) → (.*)\.", effect).groups())
        assert (tab.levels() == first) == (switch == "#all-on")
    (place, was, now), (same_place, *again) = effects
    assert place == same_place and [now, was] == again
    assert re.search("“(.*)”", place)[1].replace("\\n", "\n") in tab.text()


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
    tab.until_says("#score-result", "so far")
    tab.click("#score")
    assert tab.text_content("#score-result") == "Cancelled."
    tab.fill("#score-text", "S")
    tab.click("#score")
    assert tab.text_content("#score-result") == "At least 2 characters are needed."


# -------------------------------------------------------------------------------------- the browser


def test_without_javascript_the_page_says_what_it_needs(open_tab, smoke_page):
    opened = open_tab(smoke_page, java_script_enabled=False)
    assert "needs JavaScript" in opened.inner_text("noscript")
    assert not opened.is_visible("main")


def test_on_a_phone_a_tap_brings_the_explanation_into_view(open_tab, smoke_page):
    opened = open_tab(smoke_page, viewport={"width": 390, "height": 844}, has_touch=True)
    opened.write()
    opened.locator("#text span").nth(40).tap()
    opened.until(
        "(() => { const { top, bottom } = document.querySelector('#why').getBoundingClientRect();"
        "return top > 0 && bottom <= innerHeight + 1; })()"
    )
    opened.wait_for_timeout(300)
    place = opened.locator("#text span").nth(40).bounding_box()
    assert 0 < place["y"] < 844  # the character is in view, too
    assert "temperature 1; the text is drawn at temperature 0.7" in opened.text_content("#why")


@pytest.mark.parametrize("width", [360, 1600])
def test_nothing_is_wider_than_the_viewport(open_tab, smoke_page, width):
    opened = open_tab(smoke_page, viewport={"width": width, "height": 800})
    opened.write()
    opened.select(140)
    opened.until_inspected()
    assert opened.evaluate("document.documentElement.scrollWidth") == width


def test_code_that_is_not_the_pages_own_does_not_run(open_tab, smoke_page, tmp_path):
    page = smoke_page.read_text(encoding="utf-8")
    changed = page.replace("</body>", "<script>document.title = 'run'</script></body>")
    (tmp_path / "changed.html").write_text(changed, encoding="utf-8")
    opened = open_tab(tmp_path / "changed.html")
    opened.write()
    assert opened.title() == "plays: a GPT in a page"
    assert "Content Security" in opened.logged.pop(0)
    assert json.loads(opened.text_content("#data"))["prompt"] == "KING"
