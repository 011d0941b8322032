"""The settings that decide what a model computes, beside its sizes; and its conversion."""

import dataclasses

import torch

from model.gpt import GPT, copy_rows

CHOICES = {
    "positions": ("learned", "rope"),
    "token_shifts": (0, 3),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "relu2", "swiglu"),
    "bias": (False, True),
    "tied": (False, True),
    "qk_norm": (False, True),
    "logit_softcap": (0.0, 15.0),
}


def joined(rows):
    """The tensors that `named_rows` describes, by name."""
    return {name: torch.cat([view.detach() for view in views]) for name, views in rows.items()}


def in_layout(model, attention=None, kernel=None):
    """The same model with its attention in another layout or kernel, as checkpoints convert it."""
    changes = {"attention": attention, "kernel": kernel}
    changes = {name: value for name, value in changes.items() if value}
    weight = model.token_embedding.weight
    other = GPT(dataclasses.replace(model.config, **changes), model.vocab_size)
    other = other.to(weight.device, weight.dtype).train(model.training)
    other.load_tensors(joined(model.named_rows()))
    return other


def copy_optimizers(model, optimizers, other, others):
    """Give the optimizers of `other` the state of those of `model`, as checkpoints do."""
    for ours, theirs in zip(optimizers, others, strict=True):
        saved = joined(ours.named_rows(model))
        with torch.no_grad():
            for name, rows in theirs.named_rows(other).items():
                copy_rows(saved[name], rows)
