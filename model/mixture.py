"""A mixture: the weighted average of the probabilities of several predictors.

Predictors err in different places: GPTs of different seeds, and even more an n-gram model, which
has counted the fixed phrases that a GPT must learn from gradients. So their average usually
predicts better than each of them. Mixtures are for sampling and scoring; a run trains one GPT.

B batch, T new tokens (not in the caches), S all tokens of the context, V vocabulary
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

NGRAM_ORDER = 7  # length of the n-grams to count for a mixture; longer ones did not improve it


class Mixture(nn.Module):
    """The average of one or more GPTs, and of an n-gram model if there is one; used like a GPT.

    The n-gram model has `ngram_weight`, between 0 and 1; the GPTs share the rest equally. All must
    have the same vocabulary, and the GPTs the same block_size. The n-gram model sees no text before
    the window of the GPTs. The logits of a mixture are log-probabilities.
    """

    def __init__(
        self, gpts: Sequence[GPT], ngram_model: NgramModel | None = None, ngram_weight: float = 0.3
    ):
        super().__init__()
        self.gpts, self.ngram_model = nn.ModuleList(gpts), ngram_model
        self.ngram_weight = ngram_weight if ngram_model else 0.0
        self.gpt_weight = (1 - self.ngram_weight) / len(gpts)
        self.config, self.vocab_size = gpts[0].config, gpts[0].vocab_size

    def forward(self, ids: Tensor, caches: Sequence[list[KVCache]] | None = None) -> Tensor:
        """Compute the log-probabilities (B, T, V) of what follows each of the T new tokens.

        `ids` (B, S) and the errors are those of `GPT.forward`; `caches` are those of `new_caches`.
        """
        caches_of_gpts = caches or [None] * len(self.gpts)
        logits = [gpt(ids, cache) for gpt, cache in zip(self.gpts, caches_of_gpts, strict=True)]
        if self.ngram_model is None:
            return self.average(logits)
        ngram_probs = self.ngram_model.probs(ids.cpu().numpy(), new=logits[0].size(1))
        return self.average(logits, torch.from_numpy(ngram_probs))

    def average(self, logits: Sequence[Tensor], ngram_probs: Tensor | None = None) -> Tensor:
        """Average the probabilities of all predictors; return log-probabilities (..., V).

        `logits` has one tensor (..., V) per GPT. The result is float32, or float64 if they are. The
        sum of probabilities is a logsumexp of their logarithms, in which none underflows to 0.
        """
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        terms = [scores.log_softmax(-1, dtype) + math.log(self.gpt_weight) for scores in logits]
        if ngram_probs is not None:
            terms.append((self.ngram_weight * ngram_probs.to(logits[0].device, dtype)).log())
        return torch.stack(terms).logsumexp(0)

    @property
    def ablated_heads(self) -> list[frozenset[tuple[int, int]]]:
        """The heads that `GPT.heads_off` has ablated, of each GPT."""
        return [gpt.ablated_heads for gpt in self.gpts]

    def new_caches(self) -> list[list[KVCache]]:
        """Create empty caches: for every GPT, one per layer."""
        return [gpt.new_caches() for gpt in self.gpts]


class MixtureDecoder:
    """The fast decoder of a mixture: one `FastDecoder` for each of its GPTs."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture
        self.decoders = [FastDecoder(gpt) for gpt in mixture.gpts]
        self.threads = max(decoder.threads for decoder in self.decoders)
        self.ids = np.empty(0, np.int64)  # the context, for the n-gram model

    def prefill(self, ids: np.ndarray) -> np.ndarray:
        """Forget the old context and read ids (T,); return log-probabilities (1, V)."""
        self.ids = ids
        return self._average([decoder.prefill(ids) for decoder in self.decoders])

    def step(self, token: int) -> np.ndarray:
        """Read one more token; return log-probabilities (1, V)."""
        self.ids = np.append(self.ids, token)
        return self._average([decoder.step(token) for decoder in self.decoders])

    def _average(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        ngram_probs = None
        if self.mixture.ngram_model is not None:
            next_probs = self.mixture.ngram_model.next_probs(self.ids)  # (V,)
            ngram_probs = torch.from_numpy(next_probs)[None]
        return self.mixture.average(list(map(torch.from_numpy, logits)), ngram_probs).numpy()
