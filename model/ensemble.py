"""Ensembles: models whose probabilities are averaged, used in place of one model.

B batch, T new tokens, S total tokens, V vocabulary
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from model.fast_decode import FastDecoder
from model.gpt import GPT
from model.kv_cache import KVCache
from model.ngram_model import NgramMixture, NgramMixtureDecoder


class Ensemble(nn.Module):
    """Models with one vocabulary and one block_size; everything else about them may differ.

    It has what generation and scoring need of a `GPT`. Its logits are the logarithms of the models'
    mean probabilities, so sampling filters apply to the average.
    """

    def __init__(self, models: Sequence[GPT | NgramMixture]):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.config = models[0].config  # its block_size is that of all

    def forward(self, ids: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """Compute the logits (B, T, V) of what follows each of the T new tokens of ids (B, S).

        Arguments and errors are those of `GPT.forward`.
        """
        by_model = self.split(caches) if caches else [None] * len(self.models)
        logits = [model(ids, own) for model, own in zip(self.models, by_model, strict=True)]
        return log_mean_probs(logits)

    def new_caches(self) -> list[KVCache]:
        """Create empty caches, one per layer of every model."""
        return [cache for model in self.models for cache in model.new_caches()]

    def split(self, caches: Sequence[KVCache]) -> list[list[KVCache]]:
        """Divide the caches of `new_caches` among the models."""
        rest = iter(caches)
        return [[next(rest) for _ in model.blocks] for model in self.models]


class EnsembleDecoder:
    """A decoder for each model of an ensemble, called as one."""

    def __init__(self, ensemble: Ensemble):
        self.ensemble = ensemble
        self.decoders = [build_decoder(model) for model in ensemble.models]
        self.threads = max(decoder.threads for decoder in self.decoders)
        self.caches, self.caches_by_model = None, []

    def __call__(self, ids: np.ndarray, caches: Sequence[KVCache]) -> np.ndarray:
        """Read the last of ids (S,); `caches` hold the others. Return logits (1, V)."""
        if caches is not self.caches:  # each decoder also prepares its caches once
            self.caches, self.caches_by_model = caches, self.ensemble.split(caches)
        pairs = zip(self.decoders, self.caches_by_model, strict=True)
        return log_mean_probs([torch.from_numpy(each(ids, own)) for each, own in pairs]).numpy()


def build_decoder(
    model: GPT | NgramMixture | Ensemble,
) -> FastDecoder | NgramMixtureDecoder | EnsembleDecoder:
    """Build the fast decoder of a model: it computes one token for one text, on a CPU."""
    if isinstance(model, Ensemble):
        return EnsembleDecoder(model)
    if isinstance(model, NgramMixture):
        return NgramMixtureDecoder(model)
    return FastDecoder(model)


def log_mean_probs(logits: Sequence[Tensor]) -> Tensor:
    """Return the logarithms of the mean probabilities (..., V), from the logits of each model.

    They are float32, or float64 if the logits are.
    """
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    log_probs = torch.stack([each.log_softmax(-1, dtype=dtype) for each in logits])
    return log_probs.logsumexp(0) - math.log(len(logits))
