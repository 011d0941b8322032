"""A layout of one's own: the class of docs/attention.md, added as CONTRIBUTING.md says, passes the
tests of the others.
"""

import re
import shutil
from dataclasses import fields
from types import ModuleType

import numpy as np
import pytest
import torch

from configs import schema
from model import attention
from tests import test_attention, test_checkpoint
from tests.conftest import ROOT
from tests.runs import scalars, small_run_args, train

NAME = "sheaf"


def edited(path, *insertions):
    """Return the module in a file, with a text after the only match of each regular expression."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for pattern, new in insertions:
        (found,) = re.finditer(pattern, text, re.DOTALL)
        text = text[: found.end()] + new + text[found.end() :]
    module = ModuleType(path)
    exec(compile(text, path, "exec"), vars(module))
    return module


@pytest.fixture
def float64():
    """The dtype of test_attention."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def added(monkeypatch):
    """Edit two files, and let the product use what they declare then."""
    tour = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    (layout,) = re.findall(r"^(class \w+\(QKVProjection\):\n.*?)\n\n\n", tour, re.DOTALL | re.M)
    of_layouts = edited(
        "model/attention.py",
        (r"\n\n\n(?=def add_bias\()", f"{layout}\n\n\n"),
        (r"\nLAYOUTS: [^\n]+ = {\n", f'    "{NAME}": GPT2,\n'),
    )
    of_settings = edited("configs/schema.py", (r"\nLAYOUTS = \(", f'"{NAME}", '))
    assert tuple(of_layouts.LAYOUTS) == of_settings.LAYOUTS
    monkeypatch.setitem(attention.LAYOUTS, NAME, of_layouts.LAYOUTS[NAME])
    for section in ("ModelConfig", "SampleConfig"):
        old, new = (
            next(field for field in fields(getattr(module, section)) if field.name == "layout")
            for module in (schema, of_settings)
        )
        monkeypatch.setattr(old, "metadata", new.metadata)


def test_a_layout_in_two_files_has_the_outputs_and_gradients_of_the_others(added, float64):
    test_attention.test_every_layout_and_kernel_equals_the_reference_in_outputs_and_gradients(NAME)


def test_a_layout_in_two_files_trains_and_has_the_checkpoints_of_the_others(
    added, uninterrupted, tmp_path
):
    run = tmp_path / "run"
    code, output = train(*small_run_args(tmp_path), f"--layout={NAME}", f"--out_dir={run}")
    assert code == 0, output
    losses, others = (scalars(folder)["train/loss"] for folder in (run, uninterrupted))
    assert np.allclose(losses, others, rtol=0, atol=1e-4)
    copy = shutil.copytree(uninterrupted, tmp_path / "copy")
    test_checkpoint.test_a_run_restored_in_any_layout_has_the_tensors_of_its_checkpoint(NAME, copy)
