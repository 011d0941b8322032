"""Characters per second of the page in headless Chromium: python -m benchmarks.page

The model has the shape of configs/shakespeare.yaml and random weights, which cost the same time as
trained ones. The rates are those that the page shows: inside the window, from a prompt of one
character, and past it, where half a window is read again after every half window.
"""

import argparse
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

try:
    from playwright.sync_api import Page, sync_playwright
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; pip install -r requirements-dev.txt") from None

from configs.command import parse_train
from configs.schema import SampleConfig
from model.gpt import GPT
from model.parameters import parameter_count
from page.export import write_page
from run.checkpoint import Checkpoint, TextInfo
from training.device import select_runtime
from training.resolve import resolve

CONFIG = "configs/shakespeare.yaml"
VOCABULARY = "".join(map(chr, range(ord("A"), ord("A") + 65)))
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")  # None: playwright's own
ITS_RATE = r"([\d,]+) characters/s"
CHARACTERS = "document.querySelectorAll('#text span').length"  # the start character is one
FINISHED = "document.querySelector('#write').textContent === 'Continue'"


def export_random_model(path: Path) -> GPT:
    """Write the page of a model with random weights; return the model."""
    config = parse_train([CONFIG]).new_settings()
    config = resolve(config, select_runtime("cpu", "float32"), epochs=1)
    model = GPT(config.model, len(VOCABULARY), seed=1)
    for block in model.blocks:  # zero at the start of training
        torch.nn.init.normal_(block.mlp.down.weight, std=0.02)
    saved = Checkpoint(config, VOCABULARY, {}, TextInfo("random"))
    options = SampleConfig(ckpt="none", html=str(path), temperature=0.8)
    size = write_page(path, saved, model, options, "")
    print(
        f"{CONFIG}: {parameter_count(model):,} parameters, context {config.model.block_size}, "
        f"page of {size / 1e6:.1f} MB in float32"
    )
    return model


def characters_per_second(page: Page, prompt: str, length: int) -> int:
    """Write so many characters after the prompt; return the rate that the page shows."""
    if page.is_enabled("#restart"):
        page.click("#restart")
    page.fill("#prompt", prompt)
    page.fill("#max_new_tokens", str(length))
    page.click("#write")
    while not page.evaluate(FINISHED):
        page.wait_for_timeout(50)
    return int(re.search(ITS_RATE, page.inner_text("#status"))[1].replace(",", ""))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        block_size = export_random_model(path).config.block_size
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        print(f"Chromium {browser.version}")
        page = browser.new_page()
        began = time.perf_counter()
        page.goto(path.as_uri())  # it begins to write by itself
        while page.evaluate(CHARACTERS) < 2:
            page.wait_for_timeout(10)
        print(
            f"  from opening the page to its first character: {time.perf_counter() - began:.1f} s"
        )
        page.click("summary")  # it opens the settings
        cases = {"inside": ("A", block_size - 1), "past": ("A" * block_size, 2 * block_size)}
        rates = {name: [] for name in cases}
        for _ in range(options.repeats):
            for name, case in cases.items():
                rates[name].append(characters_per_second(page, *case))
        for name, found in rates.items():
            print(
                f"  {name} the window: {statistics.median(found):,.0f} characters/s, "
                f"median of {options.repeats} (best {max(found):,}, worst {min(found):,})"
            )
        browser.close()


if __name__ == "__main__":
    main()
