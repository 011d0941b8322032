"""The tour of attention tells the truth: its Python runs, block after block, and all that it
asserts holds.
"""

import re

import pytest
import torch

from benchmarks import attention as benchmark
from model.attention import KERNELS, LAYOUTS
from tests.conftest import ROOT

TOUR = ROOT / "docs" / "attention.md"


@pytest.fixture
def own_default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def test_the_code_of_the_tour_runs_from_its_beginning_to_its_end(own_default_dtype):
    text, session = TOUR.read_text(encoding="utf-8"), {"__name__": "tour"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert (
        len(blocks) == text.count("```python")
        and sum("assert" in block[1] for block in blocks) > 20
    )
    for block in blocks:
        above = "\n" * text.count(
            "\n", 0, block.start(1)
        )  # so that a traceback names the page's line
        exec(compile(above + block[1], TOUR, "exec"), session)


def test_the_benchmark_that_the_tour_names_has_a_row_for_every_pair(capsys):
    benchmark.main(["--sizes", "toy", "--repeats", "1"])
    printed = capsys.readouterr().out
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \|(?: \d+\.\d\d \|){3} \d+\.\d \| \de-\d\d \|$", printed, re.MULTILINE
    )
    assert rows == [(layout, kernel) for layout in LAYOUTS for kernel in KERNELS]
