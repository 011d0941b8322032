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
from model.inspect import attention_maps, heads_off, logit_lens
from run.checkpoint import TextInfo
from tests.commands import sample_main
from tests.conftest import CHROMIUM
from tests.test_page import random_model
from tests.test_sample import run_sample
from tests.variants import RECIPES, choices_of, save_model

expect.set_options(timeout=60_000)
AT_ONCE = {"alive": True, "reduced_motion": "reduce"}  # a page writes its whole text
PERSIAN = "سلام ۱۲ دنیا\nزبان‌های ایرانی\n"
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


@pytest.fixture
def open_page(browser):
    """A function that opens a page, which may request only its file.

    The text that it writes by itself is thrown away, and its settings are open, unless `alive`. It
    may not log anything nor say that it has failed, unless `broken`; one that was `saved` has style
    attributes, which are not obeyed.
    """
    opened = []

    def open_page(path, alive=False, broken=False, saved=False, script="", **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
        page, seen = context.new_page(), set()
        page.on("console", lambda message: seen.add(message.text))
        page.on("pageerror", lambda error: seen.add(str(error)))
        page.on("request", lambda request: seen.add(request.url.partition("blob:")[0]))
        page.add_init_script(script)
        page.goto(path.as_uri())
        if not alive:
            page.click("#restart")
            page.locator("#settings").evaluate("(settings) => (settings.open = true)")
        opened.append((page, broken, saved, seen, {"", path.as_uri()}))
        return page

    yield open_page
    for page, broken, saved, seen, allowed in opened:
        seen = {words for words in seen if not (saved and "inline style violates" in words)}
        assert broken or (seen <= allowed and page.is_hidden("#failure"))
        page.context.close()


@pytest.fixture(scope="module")
def smoke_page(smoke, tmp_path_factory):
    """The file of the page of the trained model, whose context is 64."""
    path = tmp_path_factory.mktemp("pages") / "smoke.html"
    sample_main([f"--ckpt={smoke}", f"--html={path}", "--prompt=KING", "--max-new-tokens=150"])
    return path


@pytest.fixture
def page(open_page, smoke_page):
    return open_page(smoke_page)


@pytest.fixture
def open_model(open_page, tmp_path):
    """A function that opens the page of a random model with the characters of a text.

    The prompt is the example question of its checkpoint. It returns the page, the model and that.
    """

    def open_model(text, prompt="", recipe="shakespeare", length=20, data=None, **options):
        vocabulary = "".join(sorted(set(text)))
        choices = choices_of(recipe) | {"block_size": 8}
        model = random_model(vocab_size=len(vocabulary), **choices)
        config = Config(model=model.config, data=DataConfig(**data or {}))
        parts = {"config": config, "text": TextInfo(question=prompt)}
        ckpt = save_model(tmp_path / "model.safetensors", model, vocabulary, **parts)
        file = tmp_path / "page.html"
        sample_main([f"--ckpt={ckpt}", f"--html={file}", f"--max-new-tokens={length}"])
        return open_page(file, **options), model, ckpt

    return open_model


@pytest.fixture
def printed(smoke):
    """A function that calls sample.py; it returns what that prints."""

    def printed(*words, ckpt=smoke):
        return run_sample(ckpt, "--device=cpu", *words)[0].removesuffix("\n")

    return printed


@pytest.fixture
def continued(printed):
    """A function that lets sample.py continue a text to n characters."""
    return lambda text, n: printed(f"--prompt={text}", f"--max-new-tokens={n - len(text)}")


def wait_for(page, box, words):
    expect(page.locator(box)).to_contain_text(words)


def write(page):
    """Write the whole text."""
    page.click("#write")
    wait_for(page, "#write", "Continue")


def wait_for_attention(page):
    expect(page.locator("#attention")).to_have_attribute("aria-busy", "false")


def select(page, i):
    page.locator("#text span").nth(i).click()
    wait_for_attention(page)


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


def after_each_layer(model, vocabulary, text, n):
    """Return the probabilities (L, V) of character n of a text after each layer."""
    window = text[window_start(n, model.config.block_size) : n]
    ids = torch.tensor([vocabulary.index(character) for character in window])
    return logit_lens(model, ids)[:, -1].double().softmax(-1)


def percent(p):
    return f"{100 * p:.{3 if p < 0.001 else 1}f}\xa0%"


def test_a_text_writes_itself_until_the_reader_takes_over(open_page, smoke_page):
    page = open_page(smoke_page, alive=True)
    wait_for_attention(page)  # of the first surprise
    surprises = [i for i, loss in enumerate(colors(page)) if loss > np.log(10)]
    assert marked(page, "selected") == [i for i in surprises if i >= 4][:1]
    page.keyboard.press("Shift")
    wait_for(page, "#write", "Continue")
    assert len(text_of(page)) < 154


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ('"logit_scale": ', '"logit_scale": 0.9, "was": ', "page/model.js must compute what model"),
        ('"blocks.0.mlp.up"', '"other"', "page/model.js cannot run this model: "),
    ],
)
def test_another_model_than_pythons_is_reported(
    open_page, smoke_page, tmp_path, right, wrong, words
):
    text = smoke_page.read_text(encoding="utf-8").replace(right, wrong)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    page = open_page(tmp_path / "page.html", alive=True, broken=True)
    wait_for(page, "#failure", words)


def test_a_page_that_a_browser_saved_again_works(page, open_page, tmp_path):
    write(page)
    select(page, 40)
    page.select_option("#layer", index=0)
    page.click("#switches button >> nth=0")
    wait_for(page, "#effect", "Changed most")
    page.fill("#score-text", "KING")
    page.click("#score")
    wait_for(page, "#score-result", "predictions")
    copy = tmp_path / "copy.html"
    source = page.evaluate("document.documentElement.outerHTML")
    source = source.replace(' role="alert" hidden=""', ' role="alert"')  # one that was shown
    copy.write_text(f"<!doctype html>{source}", encoding="utf-8")
    again = open_page(copy, saved=True)
    assert again.is_hidden("#scored") and again.inner_text("#score-result") == ""
    expect(again.locator("[role='alert']:visible")).to_have_count(0)
    write(again)
    page.click("#switches button >> nth=0")
    wait_for(page, "#effect", "Changed most")
    select(again, 40)
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
    page.locator("#text font font").nth(40).click()
    wait_for(page, "#why p", "probability")
    assert marked(page, "selected") == [40]
    page.click("#step")
    expect(page.locator("#text span")).to_have_count(155)
    untranslated = "#text, #window, #scored, #why, #score-why, #lens, #read, #most, #effect"
    assert page.locator(untranslated).evaluate_all("(all) => all.every((box) => !box.translate)")


def test_the_prompt_shows_two_lines_whole(page):
    page.fill("#prompt", "KING\nHENRY")
    box = page.locator("#prompt")
    assert box.evaluate("(box) => box.scrollHeight <= box.clientHeight")


@pytest.mark.parametrize("missing", ["Array.prototype.at", "self.Worker", ""])
def test_without_what_it_needs_the_page_says_so(open_page, smoke_page, missing):
    options = {"script": f"delete {missing}"} if missing else {"java_script_enabled": False}
    page = open_page(smoke_page, alive=True, broken=True, **options)
    last = page.inner_text("body").split("\n")[-1]
    assert "needs no network, but JavaScript and a browser of 2022" in last
    assert page.is_hidden("main")


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_is_written_and_scored_as_by_sample_py(open_model, printed, tmp_path, name):
    recipe, text = TEXTS[name]
    page, _, ckpt = open_model(text.replace("\r\n", "\n"), recipe=recipe, length=40)
    file = tmp_path / "text.txt"
    file.write_bytes(f"{text}\n".encode())  # of a prompt, one newline at the end is dropped
    page.fill("#prompt", text)
    write(page)
    expected = printed(f"--prompt=FILE:{file}", "--max-new-tokens=40", ckpt=ckpt)
    assert text_of(page) == expected
    page.fill("#score-text", f"{text}\n")
    page.click("#score")
    nats = re.match(r"\S+ nats", printed(f"--score={file}", ckpt=ckpt))[0]
    wait_for(page, "#score-result", f"{nats} per character, over {len(expected) - 40} predictions")


def test_each_line_has_its_own_direction_and_arrows_move_as_one_sees_it(open_model):
    lines = f"abc (d)\n{PERSIAN}x"
    page, *_ = open_model(lines, lines, length=1)
    write(page)
    persian = lines.index(PERSIAN)
    assert press(page, "Home", "ArrowRight", "ArrowRight") == 2
    assert press(page, "ArrowLeft") == 1
    assert press(page, "ArrowDown") in range(persian, persian + 13)
    assert press(page, "Escape") is None
    assert press(page, "Home", *["ArrowRight"] * 8) == persian
    assert press(page, *["ArrowLeft"] * 5) == persian + 6  # a number runs to the right
    assert press(page, "ArrowLeft") == persian + 5
    direction = "(lines) => lines.map((line) => getComputedStyle(line).direction)"
    assert page.locator("#text div").evaluate_all(direction)[:4] == ["ltr", "rtl", "rtl", "ltr"]


@pytest.mark.parametrize("separator", ["\\n", "=="])
def test_the_page_of_a_list_writes_one_item_after_another(open_model, printed, separator):
    page, _, ckpt = open_model("\n=a", length=300, data={"separator": separator}, **AT_ONCE)
    wait_for(page, "#write", "Continue")
    expect(page.locator("#text .selected")).to_be_in_viewport()  # the first surprise
    assert page.locator("#text span").first.is_hidden()  # the end of the item before
    end = separator.replace("\\n", "\n")
    items = text_of(page)[1:].split(end)
    assert len(items) > 3 and (items[0] + end).removesuffix("\n") == printed(ckpt=ckpt)
    read = re.search(r": (\d+)\.", page.inner_text("#read"))[1]
    assert int(read) > 2  # there was something to attend to


def test_a_model_of_answers_opens_with_its_question_and_answers_others(open_model, printed):
    data = {"separator": "\\n", "answer_after": "="}
    page, _, ckpt = open_model("\n=012", "10=", data=data, **AT_ONCE)
    for question in ("10=", "00=", "22="):
        if question != "10=":
            page.fill("#prompt", question)
            page.keyboard.press("Enter")
        wait_for(page, "#write", "Answer")
        answer = printed(f"--prompt={question}", "--max-new-tokens=20", ckpt=ckpt)
        assert text_of(page).strip() == answer.strip()
    assert not any(colors(page)[:4]) and any(colors(page)[4:])  # of the answer alone
    select(page, 4)
    page.locator("#why button", has_text="newline").click()  # it ends the answer
    page.wait_for_timeout(200)
    assert text_of(page) == "\n22=\n"
    page.click("#step")  # nothing follows an answer: it begins anew
    wait_for(page, "#text", "22==")
    for question in ("22", "00=1\n22"):
        page.fill("#prompt", question)
        page.click("#write")
        assert page.inner_text("#prompt-error") == "A question ends with “=”."
        assert page.is_visible("#prompt-error")
    page.fill("#score-text", "00=1\n22")
    page.click("#score")
    wait_for(page, "#score-result", "“\u206822\u2069” has no “=”.")


@pytest.mark.parametrize("prompt", ["KING", ""])
def test_it_writes_what_sample_py_writes_past_the_window_and_copies_it(
    open_page, smoke_page, continued, prompt
):
    page = open_page(smoke_page, permissions=["clipboard-read", "clipboard-write"])
    page.fill("#prompt", prompt)
    write(page)
    start, text = prompt or "\n", text_of(page)
    assert text == continued(start, len(start) + 150)
    assert marked(page, "given") == [*range(len(start))]
    assert press(page, "End", "Home") == (0 if prompt else 1)  # without a prompt, 0 is hidden
    assert marked(page, "before-window") == [*range(96)] and marked(page, "window-start") == [96]
    page.click("#copy")
    wait_for(page, "#status", "Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == text if prompt else f"\n{copied}" == text


def test_it_pauses_adds_a_character_and_starts_over(page, continued):
    page.fill("#max_new_tokens", "10000")
    page.click("#write")
    page.locator("#text span").nth(400).wait_for()
    page.click("#write")
    page.wait_for_timeout(200)  # the worker may have one report on its way
    length = len(text_of(page))
    page.wait_for_timeout(300)
    assert len(text_of(page)) == length
    page.fill("#max_new_tokens", "10")
    page.click("#write")
    wait_for(page, "#write", "Continue")
    page.click("#step")
    expect(page.locator("#text span")).to_have_count(length + 11)
    text = text_of(page)
    assert text == continued("KING", length + 11)
    page.click("#restart")
    assert text_of(page) == ""
    page.click("#step")
    expect(page.locator("#text span")).to_have_count(5)
    assert text_of(page) == text[:5]


def test_an_invalid_setting_is_shown_and_nothing_is_written(page):
    write(page)
    select(page, 40)
    text, status = text_of(page), page.inner_text("#status")
    page.fill("#temperature", "")
    page.fill("#prompt", "")
    for button in ("#write", "#step", "#why button:not([disabled]) >> nth=0"):
        page.click(button)
        expect(page.locator("#temperature")).to_be_focused()
        assert (text_of(page), page.inner_text("#status")) == (text, status)
    page.click("#switches button >> nth=0")  # reading needs no settings
    wait_for(page, "#effect", "Changed most")
    page.fill("#temperature", "2e6")
    page.click("#write")
    expect(page.locator("#text span")).to_have_count(151)


def test_after_the_back_button_the_fields_are_those_of_the_text(open_page, smoke_page):
    page = open_page(smoke_page, **AT_ONCE)
    page.click("summary")
    for field in ("#prompt", "#seed"):
        page.fill(field, "5")
    page.goto("about:blank")
    page.go_back()
    wait_for(page, "#write", "Continue")
    assert page.input_value("#prompt") == "KING" and page.input_value("#seed") == "1337"


def test_unknown_characters_are_named_and_removed_on_request(page):
    page.fill("#prompt", "KI\xe9N\u202eG\xe9")
    page.click("#write")
    wait_for(page, "#prompt-error", "The model has never read ‘\u2068\xe9\u2069’ (U+00E9), U+202E.")
    assert text_of(page) == ""
    page.click("#prompt-error button")
    assert page.input_value("#prompt") == "KING" and page.is_hidden("#prompt-error")


def test_another_character_continues_the_text_with_the_same_random_numbers(page, continued):
    write(page)
    text = text_of(page)
    select(page, 40)
    button = page.locator("#why button:not([disabled])").first
    name = button.locator("span").first.inner_text()
    character = {"newline": "\n", "space": " "}.get(name, name)
    button.click()
    wait_for(page, "#write", "Continue")
    assert character != text[40] and text_of(page) == continued(text[:40] + character, 154)
    expect(page.locator("#text")).to_be_focused()


def test_the_window_is_shaded_by_the_attention_of_the_chosen_head(open_model):
    vocabulary = "\n abcdefghi"
    page, model, _ = open_model(vocabulary, "abc")
    write(page)
    select(page, 19)
    window = text_of(page)[12:19]  # the model sees these
    assert page.text_content("#window") == window
    maps = attention_maps(model, torch.tensor([vocabulary.index(c) for c in window]))
    uniform = percent((1 / np.arange(2, 8)).mean())
    for layer, head in ((1, 0), (0, 1)):
        page.select_option("#layer", index=layer)
        page.click(f"#heads tr:nth-child({head + 1}) button")
        row = maps[layer][head, -1]
        assert np.allclose(colors(page, "#window", "--weight"), row / row.max(), atol=1e-4)
        for h, cells in enumerate(page.locator("#heads tr").all()):
            mean = percent(maps[layer][h].diagonal(-1).mean())
            assert f"{mean} ({uniform})" in cells.inner_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_probabilities_lens_and_heads_that_are_off_are_pythons(open_model, recipe):
    vocabulary = "\n abcdefghi"
    page, model, _ = open_model(vocabulary, "abc", recipe)
    write(page)

    def assert_equal(*selected):
        """Compare all losses, and the figures of some characters; return the mean loss."""
        text = text_of(page)
        ids = [vocabulary.index(character) for character in text]
        rows = [after_each_layer(model, vocabulary, text, n) for n in range(1, len(ids))]
        losses = [-row[-1, id].log().item() for row, id in zip(rows, ids[1:], strict=True)]
        assert colors(page)[1:] == pytest.approx(losses, abs=1e-3)
        for n in selected:
            select(page, n)
            layers, order = rows[n - 1], rows[n - 1][-1].argsort(descending=True).tolist()
            why = f"probability {percent(layers[-1, ids[n]])}, loss {losses[n - 1]:.2f} nats"
            wait_for(page, "#why p", why)
            rank = order.index(ids[n]) + 1
            shown = order[:5] if rank <= 5 else [*order[:5], ids[n]]
            shares = page.locator("#why .share").all_inner_texts()
            assert shares == [percent(layers[-1, id]) for id in shown]
            lens = page.locator("#lens tr td:last-child").all_inner_texts()
            assert lens == [percent(p) for p in layers[:, ids[n]]]
        return f"{np.mean(losses):.4f}"

    mean = assert_equal(*range(5, 20))
    switch = page.locator("#switches button[aria-label='layer 1 head 2']")
    switch.press("Space")
    wait_for(page, "#effect", "Changed most")
    with heads_off(model, [(0, 1)]):
        off = assert_equal(10)
        wait_for(page, "#effect", f"Mean loss: {mean} → {off} nats")
        page.fill("#score-text", text_of(page))
        page.click("#score")
        wait_for(page, "#score-result", "1 head off")
        wait_for(page, "#status", "1 head off")
        page.click("#step")  # the next character
        expect(page.locator("#text span")).to_have_count(24)
        assert_equal(23)
    switch.click()  # all on again
    wait_for(page, "#effect", "Changed most")
    assert_equal(10)


def test_code_that_is_not_the_pages_own_does_not_run(open_page, smoke_page, tmp_path):
    text = smoke_page.read_text(encoding="utf-8")
    changed = text.replace("</body>", "<script>document.title = 'run'</script></body>")
    (tmp_path / "changed.html").write_text(changed, encoding="utf-8")
    page = open_page(tmp_path / "changed.html", broken=True)
    write(page)
    assert page.title() == "plays: a GPT in a page"
