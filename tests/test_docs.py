"""The tours tell the truth: their Python runs, block after block, and all that it asserts holds."""

import re

import pytest
import torch

from benchmarks import attention as benchmark
from model.attention import KERNELS, LAYOUTS
from tests.conftest import ROOT

TOURS = [ROOT / "docs" / name for name in ("attention.md", "gpt.md")]

of_each_tour = pytest.mark.parametrize("tour", TOURS, ids=lambda path: path.stem)


@pytest.fixture
def own_default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@of_each_tour
def test_the_code_of_the_tour_runs_from_its_beginning_to_its_end(
    tour, own_default_dtype, monkeypatch
):
    monkeypatch.chdir(ROOT)
    text, session = tour.read_text(encoding="utf-8"), {"__name__": "tour"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert (
        len(blocks) == text.count("```python")
        and sum("assert" in block[1] for block in blocks) > 20
    )
    for block in blocks:
        above = "\n" * text.count(
            "\n", 0, block.start(1)
        )  # so that a traceback names the page's line
        exec(compile(above + block[1], tour, "exec"), session)


@of_each_tour
def test_the_links_within_the_tour_lead_to_its_headings(tour):
    text = tour.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert links and set(links) <= {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def test_the_benchmark_that_the_tour_names_has_a_row_for_every_pair(capsys):
    benchmark.main(["--sizes", "toy", "--repeats", "1"])
    printed = capsys.readouterr().out
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \|(?: \d+\.\d\d \|){3} \d+\.\d \| \de-\d\d \|$", printed, re.MULTILINE
    )
    assert rows == [(layout, kernel) for layout in LAYOUTS for kernel in KERNELS]
