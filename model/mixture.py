"""A mixture: the weighted average of the probabilities of several predictors.

A GPT must learn even a fixed phrase from gradients; an n-gram model has counted it. Two GPTs of
different seeds err in different places. Their average is better than each of them. Only sampling and
scoring use it; training knows one GPT.

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
from model.ngram_model import NgramModel

NGRAM_ORDER = 7  # in a mixture, longer n-grams predict no better


class Mixture(nn.Module):
    """The average of one or more GPTs, and of an n-gram model if there is one; used like a GPT.

    The n-gram model has `ngram_weight`; the GPTs share the rest equally. All have one vocabulary
    and one block_size. The n-gram model sees the window that the GPTs see.
    """

    def __init__(
        self, gpts: Sequence[GPT], ngram_model: NgramModel | None = None, ngram_weight: float = 0.0
    ):
        super().__init__()
        self.gpts, self.ngram_model = nn.ModuleList(gpts), ngram_model
        self.gpt_weight = (1 - ngram_weight) / len(gpts)
        self.ngram_weight = ngram_weight
        self.config, self.vocab_size = gpts[0].config, gpts[0].vocab_size

    def forward(self, ids: Tensor, caches: Sequence[list[KVCache]] | None = None) -> Tensor:
        """Compute the log-probabilities (B, T, V) of what follows each of the T new tokens.

        `ids` (B, S) has all tokens of the context, as for `GPT.forward`; so do the errors.
        """
        per_gpt = caches or [None] * len(self.gpts)
        logits = [gpt(ids, own) for gpt, own in zip(self.gpts, per_gpt, strict=True)]
        if self.ngram_model is None:
            return self.average(logits)
        probs = self.ngram_model.probs(ids.cpu().numpy(), new=logits[0].size(1))
        return self.average(logits, torch.from_numpy(probs))

    def average(self, logits: Sequence[Tensor], ngram_probs: Tensor | None = None) -> Tensor:
        """Average the predictions: one (..., V) of logits per GPT, and the n-gram probabilities.

        The log-probabilities are float32, or float64 if the logits are. Computed as logarithms, so
        that a character which one GPT finds impossible does not become so in the average.
        """
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        terms = [each.log_softmax(-1, dtype) + math.log(self.gpt_weight) for each in logits]
        if ngram_probs is not None:
            terms.append((self.ngram_weight * ngram_probs.to(logits[0].device, dtype)).log())
        return torch.stack(terms).logsumexp(0)

    def new_caches(self) -> list[list[KVCache]]:
        """Create empty caches: for every GPT, one per layer."""
        return [gpt.new_caches() for gpt in self.gpts]


class MixtureDecoder:
    """The fast decoder of a mixture: one `FastDecoder` for each of its GPTs."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture
        self.decoders = [FastDecoder(gpt) for gpt in mixture.gpts]
        self.threads = max(decoder.threads for decoder in self.decoders)
        self.ids = np.empty(0, np.int64)  # the tokens that were read

    def prefill(self, ids: np.ndarray) -> np.ndarray:
        """Read ids (T,), in place of what was read before; return log-probabilities (1, V)."""
        self.ids = ids
        return self._average([decoder.prefill(ids) for decoder in self.decoders])

    def step(self, token: int) -> np.ndarray:
        """Read one more token; return log-probabilities (1, V)."""
        self.ids = np.append(self.ids, token)
        return self._average([decoder.step(token) for decoder in self.decoders])

    def _average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        ngram_probs = None
        if self.mixture.ngram_model is not None:
            probs = self.mixture.ngram_model.next_probs(self.ids)
            ngram_probs = torch.from_numpy(probs)[None]
        return self.mixture.average(list(map(torch.from_numpy, logits)), ngram_probs).numpy()
