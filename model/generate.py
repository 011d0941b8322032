"""Generation: a prompt's ids in, one id a step out, for a batch of samples that do not know each other.

B batch, P prompt tokens, V vocabulary
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from model.gpt import GPT


def window_start(n: int, block_size: int) -> int:
    """Where the model's window begins when `n` characters have been read: a function of n alone.

    0 up to block_size; then the smallest multiple of half a block that lets the rest fit. So the window moves once
    in half a block, what is left is read afresh, and cached and uncached text follow one rule at any length.
    """
    hop = max(1, block_size // 2)
    return max(0, -(-(n - block_size) // hop) * hop)


class Sampler:
    """Chooses the next character of each sample: temperature, then top-k, top-p and min-p, then one draw.

    The filters mean what Hugging Face's warpers mean: ties at the k-th logit are all kept, the most likely character
    always is, and temperature 0 is greedy. Sample i draws from its own stream, a function of (seed, i) and of its
    position in the text: it is the same alone or among others, and goes on unchanged when its text is continued.
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

    def skip_to(self, position: int) -> None:
        """Leave out the draws of the first `position` characters; call it once, before the first draw."""
        for stream in self.streams:
            stream.bit_generator.advance(position)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits (B, V) -> ids (B,), for as many rows as there are samples. Drawn on the CPU, in float64."""
        if self.temperature < 1e-6:
            return logits.argmax(dim=-1)
        cumulative = self.probabilities(logits.cpu()).cumsum(dim=-1)
        total = cumulative[:, -1:]
        draws = torch.tensor([[stream.random()] for stream in self.streams], dtype=torch.float64)
        targets = torch.minimum(draws * total, total.nextafter(torch.zeros(())))  # below the total, however it rounds
        return torch.searchsorted(cumulative, targets, right=True).squeeze(1).to(logits.device)

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits (B, V) -> the distributions that are drawn from, (B, V) in float64."""
        logits = logits.double() / self.temperature
        if 0 < self.top_k < logits.size(-1):
            kth = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1.0:
            ascending, order = logits.sort(dim=-1)
            drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - self.top_p
            drop[:, -1] = False
            logits = logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)
        probabilities = logits.softmax(dim=-1)
        if self.min_p > 0.0:
            least = self.min_p * probabilities.amax(dim=-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        return probabilities / probabilities.sum(dim=-1, keepdim=True)


@torch.inference_mode()
def generate(
    model: GPT, prompt: Tensor, sampler: Sampler, max_new_tokens: int, *, cache: bool = True
) -> Iterator[Tensor]:
    """Continue `prompt` (B, P), P >= 1, by `max_new_tokens` ids a row, yielded as (B,) one step at a time.

    Memory does not grow with the text. `cache` changes the time it takes, and the text by no more than rounding.
    """
    if prompt.dim() != 2 or prompt.size(1) == 0:
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}; must be (B, P) with P of at least 1")
    model.eval()
    sampler.skip_to(prompt.size(1))
    block_size, n = model.config.block_size, prompt.size(1)
    recent = prompt[:, window_start(n, block_size) :]  # what the window holds: at most block_size ids
    unread, caches = recent, model.new_caches()
    for _ in range(max_new_tokens):
        logits = model(unread, caches) if cache else model(recent)
        ids = sampler(logits[:, -1])
        yield ids
        moved = window_start(n + 1, block_size) - window_start(n, block_size)
        recent = torch.cat([recent[:, moved:], ids[:, None]], dim=1)
        n += 1
        if moved:
            unread, caches = recent, model.new_caches()
        else:
            unread = ids[:, None]
