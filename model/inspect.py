"""Looking inside a trained model: what its heads attend to, and what each block would predict.

T tokens, L layers, H n_head, D head size, V vocabulary
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from model.attention import MultiHeadAttention, attention_weights
from model.gpt import GPT, Block


@torch.inference_mode()
def attention_maps(model: GPT, ids: Tensor) -> list[Tensor]:
    """Return the attention weights of each layer for ids (T,): a list of (H, T, T).

    Every row sums to 1. A kernel does not return the weights, so they are computed again from the
    queries and keys (docs/attention.md, section 6).
    """
    maps = []

    def record(layer: MultiHeadAttention, inputs: tuple[Tensor]) -> None:
        q, k, _ = layer.queries_keys_values(*inputs)
        maps.append(attention_weights(q, k, causal=True)[0])

    with ExitStack() as hooks:  # removes them at its end
        for block in model.blocks:
            hooks.enter_context(block.attention.register_forward_pre_hook(record))
        model(ids[None])
    return maps


@torch.inference_mode()
def logit_lens(model: GPT, ids: Tensor) -> Tensor:
    """Return the logits for ids (T,) if each block in turn were the last: (L, T, V).

    What does the model believe after each block (nostalgebraist 2020, the logit lens)? The final
    norm and `lm_head` read the residual stream there. The last entry is the model's output.
    """
    streams = []

    def record(block: Block, inputs: tuple[Tensor], stream: Tensor) -> None:
        streams.append(stream)

    with ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(block.register_forward_hook(record))
        model(ids[None])
    return model.unembed(torch.cat(streams))  # (L, T, V)


@contextmanager
def ablated(model: GPT, heads: Collection[tuple[int, int]]) -> Iterator[None]:
    """Ablate heads in a `with` block, each given as (layer, head), both counted from 0.

    The caches of earlier `Texts` are those of the whole model: create new texts in the block.
    Raises ValueError for a head that does not exist.
    """
    L, H = model.config.n_layer, model.config.n_head
    for layer, head in heads:
        if not (0 <= layer < L and 0 <= head < H):
            raise ValueError(
                f"no head {head} in layer {layer}; allowed: heads 0 to {H - 1} "
                f"in layers 0 to {L - 1}"
            )

    # D columns of the output projection read a head: while they are zero, it has no effect
    weights = [block.attention.out_proj.weight for block in model.blocks]  # (C, H*D) in each layer
    originals = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for layer, head in heads:
                weights[layer].unflatten(1, (H, -1))[:, head] = 0
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)
