"""docs/attention.md: its Python blocks run in order and all their assertions hold."""

import re

import pytest
import torch

from benchmarks import attention as benchmark
from model.attention import KERNELS, LAYOUTS
from tests.conftest import ROOT

ATTENTION = ROOT / "docs" / "attention.md"


@pytest.fixture
def restore_default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def test_the_code_of_attention_md_runs_from_beginning_to_end(restore_default_dtype):
    text, session = ATTENTION.read_text(encoding="utf-8"), {"__name__": "tour"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert (
        len(blocks) == text.count("```python")
        and sum("assert" in block[1] for block in blocks) > 20
    )
    for block in blocks:
        above = "\n" * text.count("\n", 0, block.start(1))  # for line numbers in a traceback
        exec(compile(above + block[1], ATTENTION, "exec"), session)


def test_the_attention_benchmark_has_a_row_for_every_layout_and_kernel(capsys):
    benchmark.main(["--sizes", "toy", "--repeats", "1"])
    printed = capsys.readouterr().out
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \|(?: \d+\.\d\d \|){3} \d+\.\d \| \de-\d\d \|$", printed, re.MULTILINE
    )
    assert rows == [(layout, kernel) for layout in LAYOUTS for kernel in KERNELS]
