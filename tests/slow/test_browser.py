"""The page in headless Chromium, opened from a file: every section does what it says, nothing is
requested and nothing reaches the console.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import expect, sync_playwright

from configs.command import parse_train
from configs.fields import format_escapes
from configs.schema import Config, DataConfig
from model.generate import window_start
from model.inspect import ablated, attention_maps, logit_lens
from tests.conftest import ROOT
from tests.runs import run_sample, sample_main
from tests.variants import CHOICES, random_model, save_model

expect.set_options(timeout=60_000)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
PAGE, CKPT = "page.html", "model.safetensors"  # in the folder of a test
RECIPES = ("nanogpt_cpu", "shakespeare", "mytext_small")  # others have the choices of one of these
LETTERS = "\n abcdefghi"
TEXT = "學而時習之\u3000不亦說乎\r\nسلام دنیا\r\n"


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
    may not log anything nor say that it has failed, unless `broken`.
    """
    opened = []

    def open_page(alive=False, broken=False, path=tmp_path / PAGE, **options):
        context = browser.new_context(**options)
        page, seen, url = context.new_page(), set(), path.as_uri()
        page.on("console", lambda message: seen.add(message.text))
        page.on("pageerror", lambda error: seen.add(str(error)))
        page.on("request", lambda request: seen.add(request.url.partition("blob:")[0]))
        page.goto(url)
        if not alive:
            page.click("#restart")
            page.locator("#settings").evaluate("(settings) => (settings.open = true)")
        opened.append((page, broken, seen, {"", url}))
        return page

    yield open_page
    for page, broken, seen, allowed in opened:
        assert broken or (seen <= allowed and page.is_hidden("#failure"))
        page.context.close()


def make_page(
    folder, text=LETTERS, prompt="abc", *, recipe="shakespeare", length=20, data=None,
    temperature="auto",
):  # fmt: skip
    """Write page and checkpoint of a random model that knows the characters of a text; return it.

    The prompt is the example question of its checkpoint.
    """
    vocabulary = "".join(sorted(set(text)))
    settings = parse_train([f"configs/{recipe}.yaml"]).config.model
    choices = {name: getattr(settings, name) for name in CHOICES}
    model = random_model(vocab_size=len(vocabulary), **choices)
    config = Config(model=model.config, data=DataConfig(**data or {}))
    text_info = {"question": prompt}
    ckpt = save_model(folder / CKPT, model, vocabulary, config, text=text_info)
    words = [f"--max-new-tokens={length}", f"--temperature={temperature}"]
    sample_main([f"--ckpt={ckpt}", f"--html={folder / PAGE}", *words])
    return model


@pytest.fixture
def page(open_page, tmp_path):
    """The open page of a model of letters."""
    make_page(tmp_path)
    return open_page()


@pytest.fixture
def printed(tmp_path):
    """A function that calls sample.py with the model of the page; it returns the likeliest text."""
    options = [tmp_path / CKPT, "--device=cpu", "--temperature=0"]
    return lambda *words: run_sample(*options, *words)[0].removesuffix("\n")


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


def switch_head(page, name="layer 1 head 2"):
    page.locator(f"#switches button[aria-label='{name}']").press("Space")
    wait_for(page, "#effect", "Changed most")


def text_of(page):
    return page.text_content("#text")


def marked(page, name):
    """Return the positions of the characters of the text that have a mark."""
    code = "(all, name) => [...all.keys()].filter((i) => all[i].classList.contains(name))"
    return page.locator("#text span").evaluate_all(code, name)


def colors(page, box="#text", name="--loss"):
    """Return the numbers that color the characters of a box."""
    code = "(all, name) => all.map((span) => Number(span.style.getPropertyValue(name)))"
    return page.locator(f"{box} span").evaluate_all(code, name)


def percent(p):
    return f"{100 * p:.{3 if p < 0.001 else 1}f}\xa0%"


def test_page_writes_as_sample_does(open_page, printed, tmp_path):
    make_page(tmp_path, TEXT.replace("\r", ""), "", length=40, temperature=0)
    page = open_page()
    for prompt in (TEXT, ""):
        page.fill("#prompt", prompt)
        write(page)
        expected = printed(f"--prompt={format_escapes(prompt or chr(10))}", "--max-new-tokens=40")
        assert text_of(page) == expected
        assert marked(page, "given") == [*range(len(expected) - 40)]
        assert marked(page, "before-window") == [*range(window_start(len(expected), 8))]
    assert page.locator("#text span").first.is_hidden()


def test_page_writes_by_itself(open_page, tmp_path):
    """It selects the first surprise, and stops at a key."""
    make_page(tmp_path, length=150)
    page = open_page(alive=True)
    wait_for_attention(page)
    surprises = [i for i, loss in enumerate(colors(page)) if i >= 3 and loss > np.log(10)]
    assert marked(page, "selected") == surprises[:1]
    page.keyboard.press("Shift")
    wait_for(page, "#write", "Continue")
    assert len(text_of(page)) < 153


def test_page_buttons(open_page, printed, tmp_path):
    """They add a character, and choose another one."""
    make_page(tmp_path, temperature=0)
    page = open_page()
    write(page)
    page.click("#step")
    expect(page.locator("#text span")).to_have_count(24)
    text = text_of(page)
    assert text == printed("--prompt=abc", "--max-new-tokens=21")
    select(page, 10)
    button = page.locator("#why button:not([disabled])").first
    name = button.locator("span").first.inner_text()
    character = {"newline": "\n", "space": " "}.get(name, name)
    button.click()
    wait_for(page, "#write", "Continue")
    assert character != text[10]
    assert text_of(page) == printed(f"--prompt={text[:10]}{character}", "--max-new-tokens=13")


def test_page_of_a_list(open_page, tmp_path):
    make_page(tmp_path, "\n=a", "", length=300, data={"separator": "=="})
    page = open_page()
    write(page)
    assert page.locator("#text span").first.is_hidden()  # the end of the item before
    assert text_of(page).count("==") > 2


def test_page_of_questions(open_page, printed, tmp_path):
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_page_equals_python(open_page, tmp_path, recipe):
    """In losses, probabilities, the logit lens, with a head off, and in attention."""
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
        wait_for(page, "#status", "heads off: 1")
        page.click("#step")  # the next character
        expect(page.locator("#text span")).to_have_count(24)
        assert_equal(23)
    switch_head(page)  # all on again
    assert_equal(10)

    select(page, 19)
    window = text_of(page)[12:19]  # the model sees these
    assert page.text_content("#window") == window
    maps = attention_maps(model, torch.tensor([LETTERS.index(c) for c in window]))
    for layer, head in ((1, 0), (0, 1)):
        page.select_option("#layer", index=layer)
        page.click(f"#heads tr:nth-child({head + 1}) button")
        row = maps[layer][head, -1]
        assert np.allclose(colors(page, "#window", "--weight"), row / row.max(), atol=1e-4)


def replace_in_page(folder, old, new):
    text = (folder / PAGE).read_text(encoding="utf-8")
    (folder / PAGE).write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ('"logit_softcap": ', '"logit_softcap": 9, "was": ', "page/model.js must compute what"),
        ('"blocks.0.mlp.up"', '"other"', "page/model.js cannot run this model: "),
    ],
)
def test_page_that_differs_says_so(open_page, tmp_path, right, wrong, words):
    make_page(tmp_path)
    replace_in_page(tmp_path, right, wrong)
    wait_for(open_page(alive=True, broken=True), "#failure", words)


def test_page_runs_no_foreign_code(open_page, tmp_path):
    make_page(tmp_path)
    replace_in_page(tmp_path, "</body>", "<script>document.title = 'run'</script></body>")
    page = open_page(broken=True)
    write(page)
    assert page.title().endswith(": a GPT in a page")


def test_page_names_unknown_characters(page):
    """They are left out."""
    page.fill("#prompt", "ab\xe9c\u202ed\xe9")
    write(page)
    wait_for(page, "#prompt-error", "Left out, never read: U+00E9 U+202E")
    assert text_of(page).startswith("abcd") and len(text_of(page)) == 24


def test_page_of_the_plays(open_page):
    """The page in docs/ computes what Python did: it says nothing else."""
    page = open_page(path=ROOT / "docs" / "plays.html")
    page.fill("#max_new_tokens", "50")
    write(page)
    assert len(text_of(page)) > 50
