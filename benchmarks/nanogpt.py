"""Models of a checkout of nanoGPT, which the benchmarks compare with ours."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch

from configs.command import parse_train
from configs.schema import ModelConfig

VOCAB_SIZE = 65  # Tiny Shakespeare's
SHAPES = {"small": "nanogpt_cpu", "baby": "nanogpt_gpu"}  # our configs of nanoGPT's two recipes


def shape(name: str, *options: str) -> ModelConfig:
    """Return the model of one of SHAPES, with options of train.py."""
    return parse_train([f"configs/{SHAPES[name]}.yaml", *options]).new_settings().model


def nanogpt_file(folder: Path, name: str) -> Path:
    """Return the path of a file in a checkout of nanoGPT; exit if it is missing."""
    path = folder / name
    if not path.exists():
        what_to_do = f"git clone https://github.com/karpathy/nanoGPT {folder}"
        if name.startswith("data/"):
            what_to_do = f"python {folder}/data/shakespeare_char/prepare.py makes it"
        raise SystemExit(f"error: {path} is missing; {what_to_do}")
    return path


def load_nanogpt_module(folder: Path) -> ModuleType:
    """Import the model.py of a nanoGPT checkout."""
    path = nanogpt_file(folder, "model.py")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_nanogpt(folder: Path, config: ModelConfig) -> torch.nn.Module:
    """Build the model of a nanoGPT checkout, without biases, in the sizes of a config."""
    module = load_nanogpt_module(folder)
    names = ("block_size", "n_layer", "n_head", "n_embd", "dropout")
    settings = {name: getattr(config, name) for name in names}
    return module.GPT(module.GPTConfig(vocab_size=VOCAB_SIZE, bias=False, **settings))
