"""Looking inside a trained model: what its heads attend to, and what each block would predict.

T tokens, L layers, H n_head, D head size, V vocabulary
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from model.attention import attention_weights
from model.gpt import GPT


@torch.inference_mode()
def attention_maps(model: GPT, ids: Tensor) -> list[Tensor]:
    """Return the attention weights of each layer for ids (T,): a list of (H, T, T).

    Every row sums to 1. A kernel does not return the weights, so they are computed again from the
    queries and keys (docs/attention.md, section 6).
    """
    x, maps = model.embed(ids[None]), []
    for block in model.blocks:
        q, k, _ = block.attention.queries_keys_values(block.attn_norm(x))
        maps.append(attention_weights(q, k, causal=True)[0])
        x = block(x)
    return maps


@torch.inference_mode()
def logit_lens(model: GPT, ids: Tensor) -> Tensor:
    """Return the logits for ids (T,) if each block in turn were the last: (L, T, V).

    What does the model believe after each block (nostalgebraist 2020, the logit lens)? The final
    norm and `lm_head` read the residual stream there. The last entry is the model's output.
    """
    x, streams = model.embed(ids[None]), []
    for block in model.blocks:
        x = block(x)
        streams.append(x)
    return model.unembed(torch.cat(streams))  # (L, T, V)


@contextmanager
def ablated(model: GPT, heads: Collection[tuple[int, int]]) -> Iterator[None]:
    """Ablate heads in a `with` block, each given as (layer, head), both counted from 0.

    The cache of an earlier `Generation` is that of the whole model: begin a new one in the block.
    """
    # D columns of the output projection read a head: while they are zero, it has no effect
    weights = [block.attention.out_proj.weight for block in model.blocks]  # (C, H*D) in each layer
    originals = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for layer, head in heads:
                weights[layer].unflatten(1, (model.config.n_head, -1))[:, head] = 0
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)
