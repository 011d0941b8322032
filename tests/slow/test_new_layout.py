"""A layout of one's own: the class of docs/attention.md passes the tests of the others."""

import re
from dataclasses import fields

import pytest
import torch

from configs.schema import ModelConfig
from model import attention
from tests import test_attention, test_layouts
from tests.conftest import ROOT
from tests.runs import losses, train

NAME = "sheaf"


@pytest.fixture
def added(monkeypatch):
    """Add it to the tables of model/attention.py and configs/schema.py."""
    tour = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"\n(from torch import nn\n\nfrom model.*?)\n\nours = ", tour, re.DOTALL)
    session = {"torch": torch}
    exec(code, session)
    monkeypatch.setitem(attention.LAYOUTS, NAME, session["GPT2"])
    (field,) = (field for field in fields(ModelConfig) if field.name == "layout")
    choices = (*field.metadata["choices"], NAME)
    monkeypatch.setattr(field, "metadata", field.metadata | {"choices": choices})


def test_new_layout_equals_reference(added):
    torch.set_default_dtype(torch.float64)
    try:
        for kernel in attention.KERNELS:
            test_attention.test_attention_equals_reference(NAME, kernel)
    finally:
        torch.set_default_dtype(torch.float32)


def test_new_layout_resumes_and_trains(added, options, uninterrupted, tmp_path):
    expected = losses(uninterrupted)
    runs = {"muon": (options, expected)}
    test_layouts.test_resume_in_another_layout(NAME, "muon", runs, tmp_path)
    code, output = train(*options, f"--layout={NAME}", f"--out_dir={tmp_path / 'new'}")
    assert code == 0, output
    assert losses(tmp_path / "new") == pytest.approx(expected, abs=1e-4)
