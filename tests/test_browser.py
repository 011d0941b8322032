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

from configs.schema import Config, DataConfig
from data.tokenizer import CharTokenizer
from model.generate import window_start
from model.gpt import MLP
from model.inspect import attention_maps, heads_off, logit_lens
from run import checkpoint
from tests.commands import sample_main
from tests.conftest import CHROMIUM
from tests.test_page import random_model
from tests.variants import RECIPES, choices_of, save_model

WAIT = 60  # seconds
SPANS = "Array.from(document.querySelectorAll('#text span'))"  # the characters of the text
SELECTED = f"{SPANS}.findIndex((span) => span.classList.contains('selected'))"
PERSIAN = "سلام دنیا\nزبان‌های ایرانی\n"
TEXTS = {  # with the recipe of the model
    "persian": ("shakespeare", PERSIAN),
    "chinese": ("fast", "學而時習之\u3000不亦說乎\n有朋自遠方來"),
    "emoji": ("shakespeare", "A: \U0001f469\u200d\U0001f4bb!\nB: \u2764\ufe0f e\u0301\u00a0so\n"),
    "windows": ("nanogpt_cpu", "one line\r\nand two\r\n"),
}


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

    Unless `alive`, the text that it writes by itself is thrown away, and its settings are open.
    """

    def __init__(self, browser, path: Path, alive=False, script="", **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
        context.set_default_timeout(1000 * WAIT)
        self.page, self.logged, self.requested = context.new_page(), [], []
        self.page.on("console", lambda message: self.logged.append(message.text))
        self.page.on("pageerror", lambda error: self.logged.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.add_init_script(script)
        self.page.goto(path.as_uri())
        if not alive:
            self.page.click("#restart")
            self.page.click("summary")

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

    def press(self, *keys: str) -> int:
        """Press keys in the text; return the position that is selected then."""
        self.page.focus("#text")
        for key in keys:
            self.page.keyboard.press(key)
        return self.page.evaluate(SELECTED)

    def losses(self, box: str = "#text") -> list[float]:
        """The losses that color the characters of a box, but for its first one."""
        return self.page.evaluate(
            f"Array.from(document.querySelectorAll('{box} span'))"
            ".map((span) => Number(span.style.getPropertyValue('--loss'))).slice(1)"
        )


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


@pytest.fixture
def open_model(open_tab, tmp_path):
    """A function that opens the page of a random model with the characters of a text.

    It returns the tab, the model and its checkpoint.
    """

    def open_model(
        text, prompt, recipe="shakespeare", block_size=8, data=None, length=20, **options
    ):
        vocabulary = "".join(sorted(set(text)))
        choices = choices_of(recipe) | {"block_size": block_size}
        model = random_model(10.0, vocab_size=len(vocabulary), **choices)
        config = Config(model=model.config, data=DataConfig(**data or {}))
        path = save_model(tmp_path / "model.safetensors", model, vocabulary, config=config)
        page = tmp_path / "page.html"
        words = [f"--prompt={prompt}", f"--max-new-tokens={length}"]
        sample_main([f"--ckpt={path}", f"--html={page}", *words])
        return open_tab(page, **options), model, path

    return open_model


@pytest.fixture(scope="module")
def trained(smoke):
    saved = checkpoint.load(smoke / "best.safetensors")
    return checkpoint.build_model(saved).eval(), CharTokenizer(saved.vocabulary)


@pytest.fixture
def printed(smoke, capsys):
    """A function that calls sample.py; it returns what that prints."""

    def printed(*words: str, ckpt: Path = smoke) -> str:
        capsys.readouterr()
        assert sample_main([f"--ckpt={ckpt}", "--device=cpu", *words]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return printed


@pytest.fixture
def continued(printed):
    """A function that continues a text to so many characters, with sample.py's first settings."""
    return lambda text, length: printed(
        f"--prompt={text}", f"--max-new-tokens={length - len(text)}"
    )


# ------------------------------------------------------------------------------------------ opening


def test_a_first_visitor_reads_two_sentences_and_a_text_that_writes_itself(
    open_tab, smoke_page, continued
):
    opened = open_tab(smoke_page, alive=True)
    opened.until("document.querySelector('#text .selected')")
    opened.until_inspected()
    assert len(opened.inner_text("header").split()) < 40
    shown = opened.inner_text("main section:first-of-type")
    assert len(shown.split()) < 80 + len(opened.text().split())
    assert "bits" not in opened.inner_text("main")  # one unit; the other is in the notes
    # at a pace that one can follow, until one takes over
    assert "characters/s" not in opened.text_content("#status")
    assert opened.text_content("#write") == "Pause" and 4 < len(opened.text()) < 154
    losses = opened.losses()[3:]  # of those that it drew; the first surprise is selected
    surprise = next(i for i, loss in enumerate(losses) if loss > np.log(10))
    assert opened.evaluate(SELECTED) == 4 + surprise
    assert opened.locator("#lens tr").count() == 2
    opened.keyboard.press("Shift")
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
    assert int(rate.replace(",", "")) > 40
    place, box = (opened.locator(f"#text{each}").bounding_box() for each in (" .selected", ""))
    assert box["y"] < place["y"] < box["y"] + box["height"]  # it is in view again


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


@pytest.mark.parametrize("missing", ["Array.prototype.at", "self.Worker", ""])
def test_without_what_it_needs_the_page_says_so(open_tab, smoke_page, missing):
    options = {"script": f"delete {missing}"} if missing else {"java_script_enabled": False}
    opened = open_tab(smoke_page, alive=True, **options)
    said = opened.inner_text("body").split("\n")[-1]
    assert "needs no network, but JavaScript and a browser of 2022" in said
    assert not opened.is_visible("main")
    opened.logged.clear()  # what was missing


# -------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_is_written_and_scored_as_by_sample_py(open_model, printed, tmp_path, name):
    recipe, text = TEXTS[name]
    opened, _, ckpt = open_model(text.replace("\r\n", "\n"), "", recipe, length=40)
    (tmp_path / "text.txt").write_bytes(text.encode())
    opened.fill("#prompt", text)
    opened.write()
    prompt = f"--prompt=FILE:{tmp_path / 'text.txt'}"
    assert opened.text() == printed(prompt, "--max-new-tokens=40", ckpt=ckpt)
    opened.fill("#score-text", text)
    opened.click("#score")
    opened.until_says("#score", "Score")
    nats = re.match(r"\S+ nats", printed(f"--score={tmp_path / 'text.txt'}", ckpt=ckpt))[0]
    assert opened.text_content("#score-result").startswith(f"{nats} per character, over ")


def test_characters_that_cannot_be_seen_have_visible_names(open_model):
    blank = "\u00a0\u3000\u00ad\u200d\ufe0f\u0301\U000e0067"
    opened, *_ = open_model(f"\n a{blank}", f"a{blank}a", block_size=16, length=1)
    opened.write()
    names = {f"U+{ord(c):04X}" for c in blank}
    dd = opened.locator("dd").all_inner_texts()
    assert names < set(" ".join(dd).split())
    for i, c in enumerate(blank):
        opened.press("Home", *["ArrowRight"] * (i + 1))
        opened.until_inspected()
        assert f"U+{ord(c):04X}: probability" in opened.inner_text("#why")
        for box in ("#why li span:first-child", "#lens td span"):
            for shown in opened.locator(box).all_inner_texts():
                assert shown in {*names, "a", "newline", "space", "↵", "␣"}
    assert opened.evaluate(
        "Array.from(document.querySelectorAll('#why li span:first-child, #lens td span'))"
        ".every((span) => span.getBoundingClientRect().width > 0)"
    )


def test_each_line_has_its_own_direction_and_arrows_move_as_one_sees_it(open_model):
    lines = f"abc (d)\n{PERSIAN}x"
    opened, *_ = open_model(lines, lines, length=1)
    opened.write()
    for box in ("#text", "#window"):
        opened.press("End")
        opened.until_inspected()
        directions = opened.evaluate(
            f"Array.from(document.querySelectorAll('{box} div'))"
            ".map((line) => getComputedStyle(line).direction)"
        )
        if box == "#text":
            assert directions[:4] == ["ltr", "rtl", "rtl", "ltr"]
        else:
            assert "rtl" in directions
    persian = lines.index(PERSIAN)
    assert opened.press("Home", "ArrowRight", "ArrowRight") == 2
    assert opened.press("ArrowLeft") == 1
    assert opened.press("ArrowDown") in range(persian, persian + 10)
    opened.press("Escape", "Home", *["ArrowRight"] * 7)  # the end of the first line
    assert opened.press("ArrowRight") == persian
    assert opened.press("ArrowLeft", "ArrowLeft") == persian + 2
    assert opened.press("ArrowRight") == persian + 1
    assert opened.press("ArrowRight", "ArrowRight") == persian - 1
    # the letters of a word join: a line is as wide as the same text in one element
    widths = opened.evaluate(
        """() => {
        const line = document.querySelectorAll('#text div')[1];
        line.style.fontFamily = 'sans-serif'; // letters of different widths
        const range = document.createRange();
        const width = () => range.getBoundingClientRect().width;
        range.setStart(line, 0);
        range.setEnd(line, line.children.length - 1); // without the newline
        const apart = width();
        line.textContent = line.textContent.trimEnd();
        range.selectNodeContents(line);
        return [apart, width()];
    }"""
    )
    assert widths[0] == pytest.approx(widths[1], rel=0.005)


@pytest.mark.parametrize("separator", ["\\n", "\\n\\n", "=="])
def test_the_page_of_a_list_writes_one_item_after_another(open_model, printed, separator):
    data = {"separator": separator}
    opened, _, ckpt = open_model("\n=a", "", data=data, length=300)
    opened.write()
    assert opened.evaluate(f"{SPANS}[0].hidden")  # the end of the item before: no empty first line
    end = separator.replace("\\n", "\n")
    items = opened.text()[1:].split(end)
    assert len(items) > 3 and (items[0] + end).removesuffix("\n") == printed(ckpt=ckpt)


def test_a_model_of_answers_opens_with_its_question_and_answers_others(open_model, printed):
    data = {"separator": "\\n", "answer_after": "="}
    opened, _, ckpt = open_model("\n=012", "10=", data=data, length=200, alive=True)
    opened.until_says("#write", "Answer")
    answer = printed("--prompt=10=", ckpt=ckpt)
    assert opened.text() == f"\n{answer}\n" != "\n10=\n"
    assert "It answers questions" in opened.inner_text("header")
    assert not any(opened.losses()[:3]) and any(opened.losses()[3:])  # of the answer alone
    assert opened.locator("#text .before-window").count() == 0
    opened.fill("#prompt", "22")
    opened.click("#write")
    assert opened.inner_text("#prompt-error") == "A question ends with “=”."
    opened.fill("#prompt", "22=")
    opened.keyboard.press("Enter")
    opened.until_says("#write", "Answer")
    assert opened.text() == "\n" + printed("--prompt=22=", ckpt=ckpt) + "\n"


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


def test_unknown_characters_are_named_and_removed_on_request(tab):
    tab.fill("#prompt", "KI\xe9N\u202eG\xe9")
    tab.click("#write")
    assert tab.inner_text("#prompt-error").startswith(
        "The model has never read ‘\xe9’ (U+00E9), U+202E."
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
    (model, tokenizer), text, losses = trained, tab.text(), tab.losses()
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
        assert why in tab.inner_text("#why")
        assert losses[n - 1] == pytest.approx(-np.log(p), abs=1e-3)
        shares = tab.locator("#why .share").all_inner_texts()
        shown = order[:5] if rank <= 5 else [*order[:5], ids[n]]
        assert shares == [f"{100 * probs[i]:.1f}\xa0%" for i in shown]
        assert tab.locator("#why .taken").count() == 1
        # what explains a number opens where it stands, for the keyboard too
        note = tab.locator("#why p span").first
        note.focus()
        shown = note.evaluate("(span) => getComputedStyle(span, '::after').content")
        assert shown.startswith(f'"Rank {rank}. ') and "before temperature" in shown
    assert min(ranks) == 1 and max(ranks) > 5


def test_another_character_continues_the_text_with_the_same_random_numbers(tab, continued):
    tab.write()
    text = tab.text()
    tab.select(40)
    button = tab.locator("#why button:not([disabled])").first
    name = button.locator("span").first.inner_text()
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
    assert tab.press("ArrowLeft") == 153
    assert tab.press("ArrowLeft") == 152
    assert tab.press("Home") == 0 and "was given" in tab.inner_text("#why")
    assert not tab.is_visible("#attention")
    assert 0 < tab.press("ArrowDown") < 154
    assert tab.press("ArrowUp") == 0
    assert tab.press("Escape") == -1
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
        tab.click(f"#heads tr:nth-child({head + 1}) button")
        row = maps[layer][head, -1]
        assert np.allclose(tab.evaluate(weights), row / row.max(), atol=1e-4)
        for h, cells in enumerate(tab.locator("#heads tr").all()):
            mean = maps[layer][h].diagonal(-1).mean()
            uniform = (1 / np.arange(2, 45)).mean()
            assert f"{100 * mean:.1f}\xa0% ({100 * uniform:.1f}\xa0%)" in cells.inner_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_lens_and_the_heads_that_are_off_are_pythons(open_model, recipe):
    vocabulary, n = "\n abcdefghi", 10
    opened, model, _ = open_model(vocabulary, "abc", recipe)
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
        """Return the figures of character n in the page."""
        opened.until_inspected()
        rows = opened.locator("#lens tr td:last-child").all_inner_texts()
        why = re.search(r"probability (\S+\s%)", opened.inner_text("#why"))[1]
        assert opened.losses() == pytest.approx(nats(opened.text()), abs=1e-3)
        return rows, why

    def expected():
        shares = lens(text, n)[:, vocabulary.index(text[n])].tolist()
        shares = [f"{100 * p:.{3 if p < 0.001 else 1}f}\xa0%" for p in shares]
        return shares, shares[-1]

    opened.select(n)
    with_all = shown()
    assert with_all == expected()
    chips = opened.locator("#lens td:nth-child(2)").all_inner_texts()
    likeliest = [vocabulary[i] for i in lens(text, n).argmax(-1)]
    names = {"\n": "↵", " ": "␣"}
    assert [cell.split()[0] for cell in chips] == [names.get(c, c) for c in likeliest]

    # one head off: its switch is in view where the selected character is
    switch = opened.locator("#switches button[aria-label='layer 1 head 2']")
    for seen in (switch, opened.locator("#text .selected")):
        place = seen.bounding_box()
        assert 0 < place["y"] < place["y"] + place["height"] < 900
    switch.focus()
    opened.keyboard.press("Space")
    opened.until_says("#effect", "Changed most")
    assert switch.get_attribute("aria-pressed") == "false"
    with heads_off(model, [(0, 1)]):
        assert shown() == expected() != with_all
        means = re.findall(r"\d\.\d{4}", opened.text_content("#effect"))
        assert float(means[1]) == pytest.approx(np.mean(nats(text)), abs=1e-4)
        opened.fill("#score-text", text)
        opened.click("#score")
        opened.until_says("#score-result", "1 head off")
        opened.click("#step")  # the next character
        opened.until(f"{SPANS}.length === {len(text) + 1}")
        assert opened.losses() == pytest.approx(nats(opened.text()), abs=1e-3)
    assert float(means[0]) == pytest.approx(np.mean(nats(text)), abs=1e-4)

    # all on again
    switch.click()
    opened.until_says("#effect", "Changed most")
    assert shown() == with_all


def test_a_long_text_has_its_colors_again_when_all_heads_are_on_again(tab):
    tab.fill("#max_new_tokens", "1500")
    tab.write()
    tab.select(1400)
    tab.until_inspected()
    first, effects = tab.losses(), []
    for on in (False, True):
        tab.click("#switches button")
        tab.until_says("#effect", "Changed most")
        effect = tab.text_content("#effect").split("Changed most: ")[1]
        effects.append(re.fullmatch(r"(.*): (.*) → (.*)\.", effect).groups())
        assert (tab.losses() == first) == on
    (place, was, now), (same_place, *again) = effects
    assert place == same_place and [now, was] == again
    assert re.search("“\u2068(.*)\u2069”", place, re.DOTALL)[1] in tab.text()


# -------------------------------------------------------------------------------------------- score


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
