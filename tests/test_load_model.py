"""Loading in Python: the example of `load_model` runs as it is written."""

import copy
import pickle
import re
import textwrap

import pytest
import torch

from configs.schema import ModelConfig
from model.gpt import GPT
from storage import load_model
from tests.runs import run_sample
from tests.variants import noisy, save_model

PROMPT = "To be, or not to be"
VOCABULARY = "".join(sorted(set(PROMPT)))


@pytest.fixture
def folder(tmp_path):
    """A run folder with a random model."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 64}
    for seed, name in enumerate(("best", "last")):
        model = noisy(GPT(ModelConfig(**sizes), len(VOCABULARY)), seed=seed)
        save_model(tmp_path / f"{name}.safetensors", model, VOCABULARY)
    return tmp_path


def test_the_example_of_load_model_runs_and_gives_what_sample_gives(folder):
    (example,) = re.findall(r"\n\n((?: {8}.*\n|\n)+)", load_model.__doc__)
    found = {}
    exec(textwrap.dedent(example).replace("out/shakespeare", str(folder)), found)
    words = [folder, "--seed=1", "--device=cpu", "--dtype=float32"]
    sample, _ = run_sample(*words, f"--prompt={PROMPT}", "--max-new-tokens=200")
    assert sample == f"{PROMPT}{found['text']}\n"
    (folder / "text.txt").write_text(PROMPT)
    score, _ = run_sample(*words, f"--score={folder / 'text.txt'}")
    assert score.startswith(f"{found['loss'].item():.4f} nats, ")
    assert found["logits"].shape == (19, len(VOCABULARY))
    assert [each.shape for each in found["maps"]] == [torch.Size([2, 19, 19])] * 2


def test_a_loaded_model_is_copied_and_pickled_as_any_module(folder):
    model, tokenizer = load_model(folder)
    ids = torch.from_numpy(tokenizer.encode(PROMPT)).long()[None]
    logits = model(ids)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for again in copies:
        assert torch.equal(again(ids), logits)
    next(copies[0].parameters()).data.zero_()
    assert torch.equal(model(ids), logits)


def test_a_damaged_best_checkpoint_is_replaced_with_a_warning(folder):
    (folder / "best.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"or damaged .*; using .*last\.safetensors instead"):
        model, _ = load_model(folder)
    expected, _ = load_model(folder / "last.safetensors")
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
