"""The page in headless Chromium, opened from a file: every section does what it says, nothing is
requested and nothing reaches the console.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import expect, sync_playwright

from configs.schema import Config, DataConfig
from model.generate import window_start
from model.inspect import ablated, attention_maps, logit_lens
from storage.checkpoint import TextInfo
from tests.commands import sample_main
from tests.conftest import CHROMIUM
from tests.runs import run_sample
from tests.variants import RECIPES, choices_of, random_model, save_model

expect.set_options(timeout=60_000)
PAGE, CKPT = "page.html", "model.safetensors"  # in the folder of a test
LETTERS = "\n abcdefghi"
PERSIAN = "سلام ۱۲ دنیا\nزبان‌های ایرانی\n"
TEXTS = (
    PERSIAN,
    "學而時習之\u3000不亦說乎\n有朋自遠方來",
    "A: \U0001f469\u200d\U0001f4bb!\nB: \u2764\ufe0f e\u0301\u00a0so\n",
    "one line\r\nand two\r\n",
)


@pytest.fixture(scope="module")
def browser():
    """The Chromium of the machine, or else the one that `playwright install` has installed."""
    with sync_playwright() as playwright:
        if not CHROMIUM and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium here; .ci/browser installs one")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """A function that opens the page of the folder, which may request only its file.

    The text that it writes by itself is thrown away, and its settings are open, unless `alive`. It
    may not log anything nor say that it has failed, unless `broken`; one that was `saved` has style
    attributes, which are not obeyed.
    """
    opened = []

    def open_page(alive=False, broken=False, saved=False, script="", **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
        page, seen, url = context.new_page(), set(), (tmp_path / PAGE).as_uri()
        page.on("console", lambda message: seen.add(message.text))
        page.on("pageerror", lambda error: seen.add(str(error)))
        page.on("request", lambda request: seen.add(request.url.partition("blob:")[0]))
        page.add_init_script(script)
        page.goto(url)
        if not alive:
            page.click("#restart")
            page.locator("#settings").evaluate("(settings) => (settings.open = true)")
        opened.append((page, broken, saved, seen, {"", url}))
        return page

    yield open_page
    for page, broken, saved, seen, allowed in opened:
        seen = {words for words in seen if not (saved and "inline style violates" in words)}
        assert broken or (seen <= allowed and page.is_hidden("#failure"))
        page.context.close()


def make_page(
    folder, text=LETTERS, prompt="abc", *, recipe="shakespeare", length=20, data=None, **sizes
):
    """Write page and checkpoint of a random model that knows the characters of a text; return it.

    The prompt is the example question of its checkpoint.
    """
    vocabulary = "".join(sorted(set(text)))
    model = random_model(vocab_size=len(vocabulary), **choices_of(recipe), **sizes)
    config = Config(model=model.config, data=DataConfig(**data or {}))
    text_info = TextInfo(question=prompt)
    ckpt = save_model(folder / CKPT, model, vocabulary, config, text=text_info)
    sample_main([f"--ckpt={ckpt}", f"--html={folder / PAGE}", f"--max-new-tokens={length}"])
    return model


@pytest.fixture
def page(open_page, tmp_path):
    """The open page of a model of letters."""
    make_page(tmp_path)
    return open_page()


@pytest.fixture
def printed(tmp_path):
    """A function that calls sample.py with the model of the page; it returns what that prints."""
    return lambda *words: run_sample(tmp_path / CKPT, "--device=cpu", *words)[0].removesuffix("\n")


def wait_for(page, box, words):
    expect(page.locator(box)).to_contain_text(words)


def write(page):
    """Write the whole text."""
    page.click("#write")
    wait_for(page, "#write", "Continue")


def score(page, text, words):
    page.fill("#score-text", text)
    page.click("#score")
    wait_for(page, "#score-result", words)


def wait_for_attention(page):
    expect(page.locator("#attention")).to_have_attribute("aria-busy", "false")


def select(page, i):
    page.locator("#text span").nth(i).click()
    wait_for_attention(page)


def switch_head(page, name="layer 1 head 2"):
    page.locator(f"#switches button[aria-label='{name}']").press("Space")
    wait_for(page, "#effect", "Changed most")


def text_of(page):
    return page.text_content("#text")


def marked(page, name):
    """Return the positions of the characters of the text that have a mark."""
    code = "(all, name) => [...all.keys()].filter((i) => all[i].classList.contains(name))"
    return page.locator("#text span").evaluate_all(code, name)


def press(page, *keys):
    """Press keys in the text; return the position that is selected then, if any."""
    page.focus("#text")
    for key in keys:
        page.keyboard.press(key)
    return next(iter(marked(page, "selected")), None)


def colors(page, box="#text", name="--loss"):
    """Return the numbers that color the characters of a box."""
    code = "(all, name) => all.map((span) => Number(span.style.getPropertyValue(name)))"
    return page.locator(f"{box} span").evaluate_all(code, name)


def percent(p):
    return f"{100 * p:.{3 if p < 0.001 else 1}f}\xa0%"


# ------------------------------------------------------------------------------ writing and scoring


def test_the_page_writes_and_scores_any_text_as_sample_py_does_past_the_window(
    open_page, printed, tmp_path
):
    make_page(tmp_path, "".join(TEXTS).replace("\r", ""), "", length=40)
    page, file = open_page(), tmp_path / "text.txt"
    for text in TEXTS:
        file.write_bytes(f"{text}\n".encode())  # of a prompt, one newline at the end is dropped
        page.fill("#prompt", text)
        write(page)
        expected = printed(f"--prompt=FILE:{file}", "--max-new-tokens=40")
        assert text_of(page) == expected
        n, start = len(expected), window_start(len(expected), 8)
        assert marked(page, "given") == [*range(n - 40)]
        assert marked(page, "before-window") == [*range(start)]
        nats = re.match(r"\S+ nats", printed(f"--score={file}"))[0]
        score(page, f"{text}\n", f"{nats} per character, over {n - 40} predictions")
    page.fill("#prompt", "")
    write(page)
    assert text_of(page) == printed("--prompt=\n", "--max-new-tokens=40")
    assert page.locator("#text span").first.is_hidden()


def test_a_text_writes_itself_until_the_reader_takes_over(open_page, tmp_path):
    make_page(tmp_path, length=150)
    page = open_page(alive=True)
    wait_for_attention(page)  # of the first surprise
    surprises = [i for i, loss in enumerate(colors(page)) if i >= 3 and loss > np.log(10)]
    assert marked(page, "selected") == surprises[:1]
    page.keyboard.press("Shift")
    wait_for(page, "#write", "Continue")
    assert len(text_of(page)) < 153


def test_the_buttons_add_a_character_copy_the_text_and_start_over(open_page, printed, tmp_path):
    make_page(tmp_path)
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    write(page)
    page.click("#step")
    expect(page.locator("#text span")).to_have_count(24)
    text = text_of(page)
    assert text == printed("--prompt=abc", "--max-new-tokens=21")
    page.click("#copy")
    wait_for(page, "#status", "Copied")
    assert page.evaluate("navigator.clipboard.readText()") == text
    page.click("#restart")
    assert text_of(page) == ""
    page.click("#step")
    expect(page.locator("#text span")).to_have_count(4)
    assert text_of(page) == text[:4]


def test_another_character_continues_the_text_with_the_same_random_numbers(page, printed):
    write(page)
    text = text_of(page)
    select(page, 10)
    button = page.locator("#why button:not([disabled])").first
    name = button.locator("span").first.inner_text()
    character = {"newline": "\n", "space": " "}.get(name, name)
    button.click()
    wait_for(page, "#write", "Continue")
    changed = printed(f"--prompt={text[:10]}{character}", "--max-new-tokens=12")
    assert character != text[10] and text_of(page) == changed


def test_a_character_may_be_replaced_while_the_text_is_read_again(page):
    write(page)
    select(page, 1)
    # in one task, so that nothing is read in between
    page.evaluate(
        """() => {
          document.querySelector("#switches button").click();
          document.querySelector("#why button:not([disabled])").click();
        }"""
    )
    wait_for(page, "#write", "Continue")
    expect(page.locator("#effect")).to_be_empty()


def test_each_line_has_its_own_direction_and_arrows_move_as_one_sees_it(open_page, tmp_path):
    lines = f"abc (d)\n{PERSIAN}x"
    make_page(tmp_path, lines, lines, length=1)
    page = open_page()
    write(page)
    persian = lines.index(PERSIAN)
    assert press(page, "Home", "ArrowRight", "ArrowRight") == 2
    assert press(page, "ArrowLeft") == 1
    assert press(page, "ArrowDown") in range(persian, persian + 13)
    assert press(page, "Escape") is None
    assert press(page, "Home", *["ArrowRight"] * 8) == persian
    assert press(page, *["ArrowLeft"] * 5) == persian + 6  # a number runs to the right
    direction = "(lines) => lines.map((line) => getComputedStyle(line).direction)"
    assert page.locator("#text div").evaluate_all(direction)[:4] == ["ltr", "rtl", "rtl", "ltr"]


def test_the_page_of_a_list_writes_one_item_after_another(open_page, printed, tmp_path):
    make_page(tmp_path, "\n=a", "", length=300, data={"separator": "=="})
    page = open_page()
    write(page)
    assert page.locator("#text span").first.is_hidden()  # the end of the item before
    items = text_of(page)[1:].split("==")
    assert len(items) > 3 and items[0] + "==" == printed()


def test_a_page_of_questions_opens_with_one_and_answers_others(open_page, printed, tmp_path):
    make_page(tmp_path, "\n=012", "10=", data={"separator": "\\n", "answer_after": "="})
    page = open_page(alive=True, reduced_motion="reduce")  # a page that writes its text at once
    for question in ("10=", "00=", "22="):
        if question != "10=":
            page.fill("#prompt", question)
            page.keyboard.press("Enter")
        wait_for(page, "#write", "Answer")
        answer = printed(f"--prompt={question}", "--max-new-tokens=20")
        assert text_of(page).strip() == answer.strip()
    assert not any(colors(page)[:4]) and any(colors(page)[4:])  # of the answer alone
    page.fill("#prompt", "00=1\n22")
    page.click("#write")
    wait_for(page, "#prompt-error", "A question ends with “=”.")
    score(page, "00=1\n22", "“\u206822\u2069” has no “=”.")


# --------------------------------------------------------------------------------- looking inside


@pytest.mark.parametrize("recipe", RECIPES)
def test_probabilities_logit_lens_and_switched_off_heads_on_the_page_equal_those_in_python(
    open_page, tmp_path, recipe
):
    model = make_page(tmp_path, recipe=recipe)
    page = open_page()
    write(page)

    def assert_equal(*selected):
        """Compare all losses, and the figures of some characters; return the mean loss."""
        ids = [LETTERS.index(character) for character in text_of(page)]
        layers_of = [None]  # (L, V): the probabilities of each character after each layer
        for n in range(1, len(ids)):
            window = torch.tensor(ids[window_start(n, model.config.block_size) : n])
            layers_of.append(logit_lens(model, window)[:, -1].double().softmax(-1))
        losses = [-layers_of[n][-1, ids[n]].log().item() for n in range(1, len(ids))]
        assert colors(page)[1:] == pytest.approx(losses, abs=1e-3)
        for n in selected:
            select(page, n)
            layers, order = layers_of[n], layers_of[n][-1].argsort(descending=True).tolist()
            why = f"probability {percent(layers[-1, ids[n]])}, loss {losses[n - 1]:.2f} nats"
            wait_for(page, "#why p", why)
            shown = order[:5] if ids[n] in order[:5] else [*order[:5], ids[n]]
            shares = page.locator("#why .share").all_inner_texts()
            assert shares == [percent(layers[-1, id]) for id in shown]
            lens = page.locator("#lens tr td:last-child").all_inner_texts()
            assert lens == [percent(p) for p in layers[:, ids[n]]]
        return f"{np.mean(losses):.4f}"

    mean = assert_equal(5, 9, 14, 19)
    switch_head(page)
    with ablated(model, [(0, 1)]):
        off = assert_equal(10)
        wait_for(page, "#effect", f"Mean loss: {mean} → {off} nats")
        score(page, text_of(page), "1 head off")
        page.click("#step")  # the next character
        expect(page.locator("#text span")).to_have_count(24)
        assert_equal(23)
    switch_head(page)  # all on again
    assert_equal(10)


def test_the_window_is_shaded_by_the_attention_of_the_chosen_head(open_page, tmp_path):
    model = make_page(tmp_path)
    page = open_page()
    write(page)
    select(page, 19)
    window = text_of(page)[12:19]  # the model sees these
    assert page.text_content("#window") == window
    maps = attention_maps(model, torch.tensor([LETTERS.index(c) for c in window]))
    for layer, head in ((1, 0), (0, 1)):
        page.select_option("#layer", index=layer)
        page.click(f"#heads tr:nth-child({head + 1}) button")
        row = maps[layer][head, -1]
        assert np.allclose(colors(page, "#window", "--weight"), row / row.max(), atol=1e-4)


# ------------------------------------------------------------------------------- what may go wrong


def replace_in_page(folder, old, new):
    text = (folder / PAGE).read_text(encoding="utf-8")
    (folder / PAGE).write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ('"logit_scale": ', '"logit_scale": 0.9, "was": ', "page/model.js must compute what model"),
        ('"blocks.0.mlp.up"', '"other"', "page/model.js cannot run this model: "),
    ],
)
def test_a_page_whose_numbers_differ_from_pythons_says_so(open_page, tmp_path, right, wrong, words):
    make_page(tmp_path)
    replace_in_page(tmp_path, right, wrong)
    wait_for(open_page(alive=True, broken=True), "#failure", words)


def test_an_old_browser_is_told_what_the_page_needs(open_page, tmp_path):
    make_page(tmp_path)
    page = open_page(alive=True, broken=True, script="delete Array.prototype.at")
    last = page.inner_text("body").split("\n")[-1]
    assert "needs no network, but JavaScript and a browser of 2022" in last
    assert page.is_hidden("main")


def test_code_that_is_not_the_pages_own_does_not_run(open_page, tmp_path):
    make_page(tmp_path)
    replace_in_page(tmp_path, "</body>", "<script>document.title = 'run'</script></body>")
    page = open_page(broken=True)
    write(page)
    assert page.title().endswith(": a GPT in a page")


def test_a_page_that_a_browser_saved_again_works(page, open_page, tmp_path):
    write(page)
    select(page, 10)
    page.select_option("#layer", index=0)
    switch_head(page)
    score(page, "abc", "predictions")
    source = page.evaluate("document.documentElement.outerHTML")
    source = source.replace(' role="alert" hidden=""', ' role="alert"')  # one that was shown
    (tmp_path / PAGE).write_text(f"<!doctype html>{source}", encoding="utf-8")
    again = open_page(saved=True)
    assert again.is_hidden("#scored") and again.inner_text("#score-result") == ""
    expect(again.locator("[role='alert']:visible")).to_have_count(0)
    write(again)
    switch_head(page)  # on again
    select(again, 10)
    for box in ("#text", "#switches", "#facts", "#why", "#window", "#layer"):
        assert again.text_content(box) == page.text_content(box), box
    assert colors(again) == pytest.approx(colors(page), abs=1e-3)


def test_a_translated_text_still_shows_why(page):
    write(page)
    page.locator("#text span").evaluate_all("""(spans) => spans.forEach((span) => {
        const font = document.createElement("font");
        font.append(...span.childNodes);
        span.append(font);
        const outer = document.createElement("font");
        span.replaceWith(outer);
        outer.append(span);
    })""")
    page.locator("#text font font").nth(10).click()
    wait_for(page, "#why p", "probability")
    assert marked(page, "selected") == [10]
    page.click("#step")
    expect(page.locator("#text span")).to_have_count(24)


def test_an_invalid_setting_is_shown_and_nothing_is_written(page):
    write(page)
    select(page, 10)
    text = text_of(page)
    page.fill("#temperature", "")
    for button in ("#write", "#why button:not([disabled]) >> nth=0"):
        page.click(button)
        expect(page.locator("#temperature")).to_be_focused()
        assert text_of(page) == text
    switch_head(page)  # reading needs no settings


@pytest.mark.parametrize("code", [{"isComposing": True}, {"keyCode": 229}], ids=str)
def test_enter_that_confirms_a_candidate_of_an_input_method_writes_nothing(
    open_page, tmp_path, code
):
    make_page(tmp_path, data={"separator": "\\n"})  # of a list, Enter writes
    page = open_page()
    for event, label in ((code, "Write"), ({}, "Continue")):
        event = {"key": "Enter", "bubbles": True, "cancelable": True} | event
        page.locator("#prompt").dispatch_event("keydown", event)
        wait_for(page, "#write", label)
        assert bool(text_of(page)) == (label == "Continue")


def test_a_text_in_the_other_unicode_form_is_read_in_that_of_the_vocabulary(open_page, tmp_path):
    make_page(tmp_path, "\ncaf\xe9", "")
    page = open_page()
    page.fill("#prompt", "cafe\u0301 ")
    page.click("#write")
    wait_for(page, "#prompt-error", "The model has never read space.")  # and no accent
    page.click("#prompt-error button")
    assert page.input_value("#prompt") == "caf\xe9"
    page.fill("#prompt", "cafe\u0301")
    write(page)
    assert text_of(page).startswith("caf\xe9") and len(text_of(page)) == 24
    score(page, "cafe\u0301", "over 3 predictions")


def test_unknown_characters_are_named_and_removed_on_request(page):
    page.fill("#prompt", "ab\xe9c\u202ed\xe9")
    page.click("#write")
    wait_for(page, "#prompt-error", "The model has never read ‘\u2068\xe9\u2069’ (U+00E9), U+202E.")
    assert text_of(page) == ""
    page.click("#prompt-error button")
    assert page.input_value("#prompt") == "abcd" and page.is_hidden("#prompt-error")
