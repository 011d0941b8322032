"""Loading in Python: the example of `load_model` runs as it is written."""

import copy
import pickle
import re
import shutil
import textwrap

import pytest
import torch

from model.gpt import GPT
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


def test_a_loaded_model_is_copied_and_pickled_and_gives_its_weights_as_any_module(smoke):
    model, tokenizer = load_model(smoke)
    ids = torch.from_numpy(tokenizer.encode("To be, or not to be")).long()[None]
    logits = model(ids)
    other = GPT(model.config, model.vocab_size, seed=1).eval()
    assert not torch.equal(other(ids), logits)
    other.load_state_dict(model.state_dict())
    copies = [other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for again in copies:
        assert torch.equal(again(ids), logits)
    next(copies[1].parameters()).data.zero_()
    assert torch.equal(model(ids), logits)


def test_a_damaged_best_checkpoint_is_replaced_with_a_warning(smoke, tmp_path):
    copy = shutil.copytree(smoke, tmp_path / "copy")
    (copy / "best.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"empty file .*; using .*last\.safetensors instead"):
        model, _ = load_model(copy)
    expected, _ = load_model(smoke / "last.safetensors")
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
