"""Loading in Python: the example of `load_model` runs as it is written."""

import re
import shutil
import textwrap

import pytest
import torch

from run import load_model
from tests.test_sample import run_sample


def test_the_example_in_the_docstring_runs_and_gives_what_sample_gives(smoke, tmp_path):
    (example,) = re.findall(r"\n\n((?: {8}.*\n|\n)+)", load_model.__doc__)
    code = textwrap.dedent(example).replace("out/shakespeare", str(smoke))
    found = {}
    exec(code, found)
    words = [smoke, "--seed=1", "--device=cpu"]
    sample, _ = run_sample(*words, "--prompt=To be, or not to be", "--max-new-tokens=200")
    assert sample == f"To be, or not to be{found['text']}\n"
    (tmp_path / "text.txt").write_text("To be, or not to be")
    score, _ = run_sample(*words, f"--score={tmp_path / 'text.txt'}")
    assert score.startswith(f"{found['loss'].item():.4f} nats, ")
    assert found["logits"].shape == (19, found["model"].vocab_size)
    assert [each.shape for each in found["maps"]] == [torch.Size([2, 19, 19])] * 2


def test_a_damaged_best_checkpoint_is_replaced_with_a_warning(smoke, tmp_path):
    copy = shutil.copytree(smoke, tmp_path / "copy")
    (copy / "best.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"empty file .*; using .*last\.safetensors instead"):
        model, _ = load_model(copy)
    expected, _ = load_model(smoke / "last.safetensors")
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
