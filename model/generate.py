"""Generation: a text's ids in, one id a step out, for a batch of samples that do not know each
other.

What the model sees of a text is a window, whose place depends on the number of characters alone. So
a text is the same with and without caches, and one that is continued goes on as if it had never
stopped.

B batch, T characters read now, V vocabulary
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from model.fast_decode import LeanStep
from model.gpt import GPT


def window_start(n: int, block_size: int, window: str = "stepped") -> int:
    """Where the model's window begins when the text has `n` characters: 0 as long as all of them
    fit.

    After that, `stepped`: at the smallest multiple of half a block that lets the rest fit. The
    window then moves once in half a block, and what is left in it is read afresh: the cost of a
    character stays bounded. `exact`: at the last block_size characters, as in nanoGPT. The window
    then moves, and is read afresh, with every character.
    """
    if window == "exact":
        return max(0, n - block_size)
    hop = max(1, block_size // 2)
    return max(0, -(-(n - block_size) // hop) * hop)


class Sampler:
    """Chooses the next character of each sample: temperature, then top-k, top-p and min-p, then one
    draw.

    The filters mean what Hugging Face's warpers mean: ties at the k-th logit are all kept, the most
    likely character always is, and temperature 0 is greedy. Sample i draws from its own stream, a
    function of (seed, i), one number for each character of its text: it is the same alone or among
    others, and goes on unchanged when its text is continued.
    """

    def __init__(
        self,
        seed: int = 0,
        samples: Sequence[int] = (0,),
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ):
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.streams = [np.random.Generator(np.random.PCG64((seed, i))) for i in samples]

    def skip(self, characters: int) -> None:
        """Leave out the draws of characters that were read."""
        for stream in self.streams:
            stream.bit_generator.advance(characters)

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """logits (B, V) -> ids (B,), for as many rows as there are samples; drawn in float64."""
        if self.temperature < 1e-6:
            return logits.argmax(axis=-1)
        cumulative = self.weights(logits).cumsum(axis=-1)
        shares = np.array(
            [[1.0 - stream.random()] for stream in self.streams]
        )  # never 0, at times 1
        return (cumulative >= shares * cumulative[:, -1:]).argmax(axis=-1)

    def weights(self, logits: np.ndarray) -> np.ndarray:
        """logits (B, V) -> what the probabilities are proportional to, (B, V) in float64; the
        largest of a row is 1.
        """
        logits = logits.astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        logits /= self.temperature
        if 0 < self.top_k < logits.shape[1]:
            kth = np.partition(logits, -self.top_k, axis=-1)[:, -self.top_k, None]
            logits[logits < kth] = -np.inf
        weights = np.exp(logits)
        if self.top_p < 1.0:
            order = weights.argsort(axis=-1, kind="stable")
            cumulative = np.take_along_axis(weights, order, axis=-1).cumsum(axis=-1)
            drop = cumulative <= (1.0 - self.top_p) * cumulative[:, -1:]
            drop[:, -1] = False
            weights[np.arange(len(order))[:, None], order] *= ~drop
        if self.min_p > 0.0:
            weights[weights < self.min_p] = 0.0
        return weights


class Text:
    """A batch of equally long texts that grow, by what is read and by what is drawn.

    Memory is that of one window. `cache` changes the time it takes, and the text by no more than
    rounding. One sample in float32 on a CPU goes on by `LeanStep`, everything else by
    `GPT.forward`.
    """

    def __init__(
        self, model: GPT, sampler: Sampler, *, cache: bool = True, window: str = "stepped"
    ):
        self.model, self.sampler = model.eval(), sampler
        self.cache, self.window = cache, window
        self.length, self.start = 0, 0  # of the whole text; where the window begins in it
        self.ids = np.empty(
            (len(sampler.streams), 0), np.int64
        )  # what the window holds: at most block_size characters
        self.caches = None  # of what was read of the window
        weight = model.token_embedding.weight
        fits = (
            cache
            and len(self.ids) == 1
            and weight.dtype == torch.float32
            and weight.device.type == "cpu"
        )
        self.lean = LeanStep(model) if fits else None

    def read(self, ids: np.ndarray) -> None:
        """Go on with `ids` (B, T)."""
        self.sampler.skip(ids.shape[1])
        self._append(ids)

    def draw(self) -> np.ndarray:
        """Choose the next character of each text, and go on with it: (B,). ValueError for an empty
        text.
        """
        if self.length == 0:
            raise ValueError("a text needs at least 1 character to go on from")
        ids = self.sampler(self._logits())
        self._append(ids[:, None])
        return ids

    def _append(self, ids: np.ndarray) -> None:
        self.length += ids.shape[1]
        start = window_start(self.length, self.model.config.block_size, self.window)
        self.ids = np.concatenate([self.ids, ids], axis=1)[:, start - self.start :]
        if start != self.start:
            self.start, self.caches = start, None

    def _logits(self) -> np.ndarray:
        """What the model expects next: (B, V)."""
        if not self.cache:
            return self._forward(self.ids)
        if self.caches is None:
            self.caches = self.model.new_caches()
        if self.lean and 0 < self.caches[0].length == self.ids.shape[1] - 1:
            return self.lean(self.ids[0], self.caches)
        return self._forward(self.ids, self.caches)

    @torch.inference_mode()
    def _forward(self, ids, caches=None) -> np.ndarray:
        ids = torch.from_numpy(ids).to(self.model.token_embedding.weight.device)
        return self.model(ids, caches)[:, -1].cpu().double().numpy()


def generate(
    model: GPT,
    prompt: Tensor,
    sampler: Sampler,
    max_new_tokens: int,
    *,
    cache: bool = True,
    window: str = "stepped",
) -> Iterator[Tensor]:
    """Continue `prompt` (B, T) by `max_new_tokens` ids a row, yielded as (B,) one step at a time: a
    `Text`, drawn.
    """
    text = Text(model, sampler, cache=cache, window=window)
    text.read(prompt.cpu().numpy())
    for _ in range(max_new_tokens):
        yield torch.from_numpy(text.draw())
