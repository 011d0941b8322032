"""The settings that change the function a model computes; random models and their checkpoints."""

import torch

from configs.schema import Config, ModelConfig
from model.gpt import GPT
from model.parameters import named_tensors
from storage.checkpoint import Checkpoint, to_bytes

CHOICES = {
    "positions": ("learned", "rope"),
    "n_previous": (0, 3),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "relu2", "swiglu"),
    "bias": (False, True),
    "tie_weights": (False, True),
    "qk_norm": (False, True),
    "logit_softcap": (0.0, 15.0),
}
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 8}


def noisy(model, scale=0.3, seed=1):
    """Add noise to all parameters of a new model, whose predictions are almost uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    return model


def random_model(seed=0, vocab_size=11, **choices):
    """A small model in which no parameter is neutral: biases are not 0, norm weights not 1."""
    config = ModelConfig(**SIZES | choices)
    return noisy(GPT(config, vocab_size), seed=seed).eval()


def checkpoint_of(model, vocabulary, config=None, **more):
    """Return the checkpoint of a model that was not trained."""
    tensors = {f"model.{name}": each for name, each in named_tensors(model).items()}
    config = config or Config(model=model.config)
    return Checkpoint(config, vocabulary, tensors, **more)


def save_model(path, model, vocabulary, config=None, **more):
    """Write the checkpoint of a model that was not trained; return its path."""
    path.write_bytes(to_bytes(checkpoint_of(model, vocabulary, config, **more)))
    return path
