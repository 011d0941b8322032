"""Generation: sampling the next character, and the growing texts of a batch of samples.

The model sees a window of the text, whose start depends only on the text's length. So the text is
the same with and without the KV cache, and the same whether it is generated at once or continued
later.

B batch, T new tokens, V vocabulary
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from model.gpt import GPT
from model.kv_cache import KVCache

GREEDY_BELOW = 1e-6  # below this temperature, take the likeliest character


def window_start(n: int, block_size: int) -> int:
    """Return where the model's window starts in a text of `n` characters: 0 as long as it fits.

    Afterwards it is the smallest multiple of block_size // 2 from which the rest of the text fits
    into block_size. The window moves by half of block_size at a time. The KV cache is recomputed
    only when the window moves, so the average cost of a character stays bounded:

        block_size 8:  n        7  8  9 10 11 12 13 14 15 16 17
                       start    0  0  4  4  4  4  8  8  8  8 12
    """
    hop = max(1, block_size // 2)
    hops = math.ceil((n - block_size) / hop)
    return max(0, hops * hop)


# ----------------------------------------------------------------------------------------- sampling


class Sampler:
    """The random choice of each sample's next character, by temperature, top-k, top-p and min-p.

    The filters do what Hugging Face's do; the most likely character always stays. Sample i (counted
    from 0) has its own random generator, seeded with (seed, i), which yields exactly one number per
    character of the text; at temperature 0, none. So a sample is the same text whether it is drawn
    alone or in a batch, and whether it is drawn at once or continued later.
    """

    def __init__(self, seed=0, samples=(0,), *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.rngs = [np.random.Generator(np.random.PCG64((seed, i))) for i in samples]

    def advance(self, characters: int) -> None:
        """Skip the random numbers of a prompt, so that every character of a text has its own."""
        # PCG64 skips any number of draws at once
        for rng in self.rngs:
            rng.bit_generator.advance(characters)

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Draw one id per sample, (B,), from logits (B, V); computed in float64."""
        if self.temperature < GREEDY_BELOW:
            return logits.argmax(axis=-1)

        # inverse transform sampling: the first id whose cumulative probability reaches u
        cumulative = self.unnormalized_probs(logits).cumsum(axis=-1)  # (B, V)
        # u is in (0, 1]: with u = 0, a first id of probability 0 could be drawn
        u = np.array([[1.0 - rng.random()] for rng in self.rngs])  # (B, 1)
        return (cumulative >= u * cumulative[:, -1:]).argmax(axis=-1)

    def unnormalized_probs(self, logits: np.ndarray) -> np.ndarray:
        """Return the filtered probabilities (B, V), each row scaled so that its largest is 1."""
        # subtract the largest logit, so that exp cannot overflow; then scale by the temperature
        logits = logits.astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        logits /= self.temperature

        if 0 < self.top_k < logits.shape[1]:
            kth = np.partition(logits, -self.top_k, axis=-1)[:, -self.top_k]  # (B,): k-th largest
            logits[logits < kth[:, None]] = -np.inf  # ties of the k-th stay
        probs = np.exp(logits)
        if self.top_p < 1.0:
            apply_top_p(probs, self.top_p)
        probs[probs < self.min_p] = 0.0
        return probs


def apply_top_p(probs: np.ndarray, p: float) -> None:
    """Keep the fewest entries of each row (B, V), largest first, that sum to at least p.

    p = 0.7, probs = [0.5, 0.125, 0.25, 0.125]
    ascending        [0.125, 0.125, 0.25, 0.5]
    cumulative sums  [0.125, 0.25,  0.5,  1.0]; entries with a sum <= 1 - p are dropped
    probs          = [0.5, 0, 0.25, 0]
    """
    order = probs.argsort(axis=-1, kind="stable")  # (B, V)
    cumulative = np.take_along_axis(probs, order, axis=-1).cumsum(axis=-1)
    dropped = cumulative <= (1.0 - p) * cumulative[:, -1:]
    dropped[:, -1] = False  # the most likely one stays
    rows = np.arange(len(order))[:, None]
    probs[rows, order] *= ~dropped


# --------------------------------------------------------------------------------------- generation


class Generation:
    """The texts of a batch of samples, of equal length: prompts are appended, characters drawn.

    The model sees a window of them (see `window_start`), so only their ends are kept. `cache`
    affects only the speed and the rounding of the logits. The model is left in evaluation mode, and
    must not change.
    """

    def __init__(self, model: GPT, sampler: Sampler, *, cache: bool = True):
        self.model = model.eval()  # no dropout
        # nn.Module finds parameters and submodules in __getattr__, after the normal lookup has
        # failed: up to a seventh of the time per character on a CPU. Plain attributes are found
        # at once.
        for module in model.modules():
            module.__dict__.update(module._modules, **module._parameters)
        self.sampler = sampler
        self.length = 0  # of each text
        self.recent_ids = np.empty(
            (len(sampler.rngs), 0), np.int64
        )  # its last block_size ids, at most
        self.start = 0  # of the window
        self.cache = model.new_cache() if cache else None

    def append(self, ids: np.ndarray) -> None:
        """Append supplied ids (B, T), such as a prompt, to the texts."""
        self.sampler.advance(ids.shape[1])
        self._append_ids(ids)

    def draw(self) -> np.ndarray:
        """Draw the next character of each text, which is not empty, and append it: ids (B,)."""
        start = window_start(self.length, self.model.config.block_size)
        # a window that has moved is read again: its tokens have other positions
        if self.cache is not None and start != self.start:
            self.cache = self.model.new_cache()
        self.start = start
        read = start if self.cache is None else start + self.cache.length
        unread = self.length - read  # characters; at least the last one
        ids = self.sampler(last_logits(self.model, self.recent_ids[:, -unread:], self.cache))
        self._append_ids(ids[:, None])
        return ids

    def _append_ids(self, ids: np.ndarray) -> None:
        self.length += ids.shape[1]
        # what has left the window for good is dropped: a long text takes no longer per character
        block_size = self.model.config.block_size
        self.recent_ids = np.concatenate([self.recent_ids, ids], axis=1)[:, -block_size:]


@torch.inference_mode()
def last_logits(model: GPT, ids: np.ndarray, cache: KVCache | None = None) -> np.ndarray:
    """Run the model on ids (B, T); return the logits (B, V) after the last one."""
    ids = torch.from_numpy(ids).to(model.lm_head.weight.device)
    return model(ids, cache)[:, -1].cpu().double().numpy()


def generate(
    model: GPT, prompt: Tensor, sampler: Sampler, max_new_tokens: int, *, cache: bool = True
) -> Iterator[Tensor]:
    """Continue `prompt` (B, T) by max_new_tokens characters; yield the ids (B,) of each."""
    generation = Generation(model, sampler, cache=cache)
    generation.append(prompt.cpu().numpy())
    for _ in range(max_new_tokens):
        yield torch.from_numpy(generation.draw())
