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

    The text that it writes by itself is thrown away, unless `alive`. It may not log anything nor
    say that it has failed, unless `broken`.
    """
    opened = []

    def open_page(alive=False, broken=False, path=tmp_path / PAGE):
        page, seen, url = browser.new_page(), set(), path.as_uri()
        page.on("console", lambda message: seen.add(message.text))
        page.on("pageerror", lambda error: seen.add(str(error)))
        page.on("request", lambda request: seen.add(request.url.partition("blob:")[0]))
        page.goto(url)
        if not alive:
            page.click("#restart")
        opened.append((page, broken, seen, {"", url}))
        return page

    yield open_page
    for page, broken, seen, allowed in opened:
        assert broken or (seen <= allowed and page.is_hidden("#failure"))
        page.close()


def make_page(folder, *options, text=LETTERS, prompt="abc", recipe="shakespeare", **data):
    """Write page and checkpoint of a random model that knows the characters of a text; return it.

    The prompt is the example question of its checkpoint. The options are those of sample.py.
    """
    vocabulary = "".join(sorted(set(text)))
    settings = parse_train([f"configs/{recipe}.yaml"]).config.model
    choices = {name: getattr(settings, name) for name in CHOICES}
    model = random_model(vocab_size=len(vocabulary), **choices)
    config = Config(model=model.config, data=DataConfig(**data))
    ckpt = save_model(folder / CKPT, model, vocabulary, config, text={"question": prompt})
    sample_main([f"--ckpt={ckpt}", f"--html={folder / PAGE}", "--max-new-tokens=20", *options])
    return model


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


def select(page, i):
    page.locator("#text span").nth(i).click()
    expect(page.locator("#attention")).to_have_attribute("aria-busy", "false")


def colors(page, box="#text", name="--loss"):
    """Return the numbers that color the characters of a box."""
    code = "(all, name) => all.map((span) => Number(span.style.getPropertyValue(name)))"
    return page.locator(f"{box} span").evaluate_all(code, name)


def percent(p):
    return f"{100 * p:.{3 if p < 0.001 else 1}f}\xa0%"


def test_page_of_the_plays(open_page):
    """The page in docs/ writes by itself, and computes what Python did: it says nothing else."""
    page = open_page(alive=True, path=ROOT / "docs" / "plays.html")
    page.locator("#text span").nth(50).wait_for(state="attached")


def test_page_writes_as_sample_does(open_page, printed, tmp_path):
    make_page(tmp_path, "--temperature=0", text=TEXT.replace("\r", ""))
    page = open_page()
    for prompt in (TEXT, ""):
        page.fill("#prompt", prompt)
        write(page)
        shown = format_escapes(prompt or "\n")
        assert page.text_content("#text") == printed(f"--prompt={shown}", "--max-new-tokens=20")


def test_page_of_another_choice(open_page, printed, tmp_path):
    """A click on one of the likeliest characters takes it, and writes on."""
    make_page(tmp_path, "--temperature=0")
    page = open_page()
    write(page)
    text = page.text_content("#text")
    select(page, 10)
    button = page.locator("#why button:not([disabled])").first
    name = button.locator("span").first.inner_text()
    character = {"newline": "\n", "space": " "}.get(name, name)
    button.click()
    wait_for(page, "#write", "Continue")
    expected = printed(f"--prompt={text[:10]}{character}", "--max-new-tokens=12")
    assert character != text[10] and page.text_content("#text") == expected


def test_page_of_a_list(open_page, tmp_path):
    make_page(tmp_path, "--max-new-tokens=300", text="\n=a", prompt="", separator="==")
    page = open_page()
    write(page)
    assert page.locator("#text span").first.is_hidden()  # the end of the item before
    assert page.text_content("#text").count("==") > 2


def test_page_of_questions(open_page, printed, tmp_path):
    make_page(tmp_path, text="\n=012", prompt="10=", separator="\\n", answer_after="=")
    page = open_page()
    for question in ("10=", "22="):
        page.fill("#prompt", question)
        page.keyboard.press("Enter")
        wait_for(page, "#write", "Answer")
        answer = printed(f"--prompt={question}", "--max-new-tokens=20")
        assert page.text_content("#text").strip() == answer.strip()
    assert not any(colors(page)[:4]) and any(colors(page)[4:])  # of the answer alone


# the other recipes have the choices of one of these
@pytest.mark.parametrize("recipe", ["nanogpt_cpu", "shakespeare", "mytext_small"])
def test_page_equals_python(open_page, tmp_path, recipe):
    """In losses, probabilities, the logit lens, with a head off, and in attention."""
    model = make_page(tmp_path, recipe=recipe)
    page = open_page()
    write(page)
    ids = [LETTERS.index(character) for character in page.text_content("#text")]

    def assert_equal(*selected):
        """Compare all losses, and the figures of some characters; return the mean loss."""
        layers_of = [None]  # (L, V): the probabilities of each character after each layer
        for n in range(1, len(ids)):
            window = torch.tensor(ids[window_start(n, model.config.block_size) : n])
            layers_of.append(logit_lens(model, window)[:, -1].double().softmax(-1))
        losses = [-layers_of[n][-1, ids[n]].log().item() for n in range(1, len(ids))]
        assert colors(page)[1:] == pytest.approx(losses, abs=1e-3)
        for n in selected:
            select(page, n)
            layers, likeliest = layers_of[n], layers_of[n][-1].sort(descending=True).values[:5]
            why = f"probability {percent(layers[-1, ids[n]])}, loss {losses[n - 1]:.2f} nats"
            wait_for(page, "#why p", why)
            shares = page.locator("#why .share").all_inner_texts()
            assert shares[:5] == [percent(p) for p in likeliest]
            lens = page.locator("#lens tr td:last-child").all_inner_texts()
            assert lens == [percent(p) for p in layers[:, ids[n]]]
        return f"{np.mean(losses):.4f}"

    mean = assert_equal(5, 9, 14, 19)
    window = ids[12:19]  # the model sees these
    maps = attention_maps(model, torch.tensor(window))
    for layer, head in ((1, 0), (0, 1)):
        page.select_option("#layer", index=layer)
        page.click(f"#heads tr:nth-child({head + 1}) button")
        row = maps[layer][head, -1]
        assert np.allclose(colors(page, "#window", "--weight"), row / row.max(), atol=1e-4)

    page.click("#switches button[aria-label='layer 1 head 2']")
    wait_for(page, "#effect", "Changed most")
    with ablated(model, [(0, 1)]):
        off = assert_equal(10)
    wait_for(page, "#effect", f"Mean loss: {mean} → {off} nats")


def replace_in_page(folder, old, new):
    text = (folder / PAGE).read_text(encoding="utf-8")
    (folder / PAGE).write_text(text.replace(old, new), encoding="utf-8")


def test_page_that_differs_says_so(open_page, tmp_path):
    make_page(tmp_path)
    replace_in_page(tmp_path, '"logit_softcap": ', '"logit_softcap": 9, "was": ')
    wait_for(open_page(broken=True), "#failure", "page/model.js must compute what")


def test_page_runs_no_foreign_code(open_page, tmp_path):
    make_page(tmp_path)
    replace_in_page(tmp_path, "</body>", "<script>document.title = 'run'</script></body>")
    page = open_page(broken=True)
    write(page)
    assert page.title().endswith(": a GPT in a page")


def test_page_names_unknown_characters(open_page, tmp_path):
    """They are left out."""
    make_page(tmp_path)
    page = open_page()
    page.fill("#prompt", "ab\xe9c\u202ed\xe9")
    write(page)
    wait_for(page, "#prompt-error", "Left out, never read: U+00E9 U+202E")
    assert page.text_content("#text").startswith("abcd")
