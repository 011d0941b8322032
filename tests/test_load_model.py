"""Loading in Python: the example of `load_model` runs as it is written."""

import inspect
import re
import textwrap

import torch

from storage.checkpoint import load_model
from tests.runs import run_sample
from tests.variants import random_model, save_model

PROMPT = "To be, or not to be"
VOCABULARY = "".join(sorted(set(PROMPT)))


def test_load_model_example(tmp_path):
    """It gives what sample.py gives."""
    for seed, name in enumerate(("best", "last")):
        model = random_model(seed, len(VOCABULARY), block_size=64)
        save_model(tmp_path / f"{name}.safetensors", model, VOCABULARY)
    # from Python 3.13 on, __doc__ has no indentation of the code
    (example,) = re.findall(r"\n\n((?: {4}.*\n|\n)+)", inspect.cleandoc(load_model.__doc__))
    found = {}
    exec(textwrap.dedent(example).replace("out/shakespeare", str(tmp_path)), found)
    words = [tmp_path, "--seed=1", "--device=cpu", "--dtype=float32"]
    sample, _ = run_sample(*words, f"--prompt={PROMPT}", "--max-new-tokens=200")
    assert sample == f"{PROMPT}{found['text']}\n"
    (tmp_path / "text.txt").write_text(PROMPT)
    score, _ = run_sample(*words, f"--score={tmp_path / 'text.txt'}")
    assert score.startswith(f"{found['loss'].item():.4f} nats, ")
    assert found["logits"].shape == (19, len(VOCABULARY))
    assert [each.shape for each in found["maps"]] == [torch.Size([2, 19, 19])] * 2
