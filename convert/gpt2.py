"""GPT-2's names of parameters, which nanoGPT and Hugging Face both use.

The weight of a linear layer is (out, in) in nanoGPT, as in PyTorch and in this project; in Hugging
Face's GPT-2 it is (in, out).
"""

import re

import torch
from torch import Tensor

from model.gpt import GPT
from model.parameters import named_slices

PREFIX = "transformer."
MODULES = {  # name of a module here -> in GPT-2
    "token_embedding": f"{PREFIX}wte",
    "position_embedding": f"{PREFIX}wpe",
    "final_norm": f"{PREFIX}ln_f",
    "lm_head": "lm_head",
}
BLOCK_MODULES = {  # the same inside a block; GPT-2 has one matrix for q, k and v
    "attn_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
TOKEN_EMBEDDING, LM_HEAD = f"{PREFIX}wte.weight", "lm_head.weight"
EMBEDDINGS = (TOKEN_EMBEDDING, f"{PREFIX}wpe.weight", LM_HEAD)  # these never have biases


def gpt2_name(name: str) -> str:
    """Return GPT-2's name of a parameter of `named_slices`.

    `blocks.0.mlp.up` -> `transformer.h.0.mlp.c_fc.weight`
    """
    module = name.removesuffix(".bias")
    parameter = "weight" if module == name else "bias"
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", module):
        return f"{PREFIX}h.{block[1]}.{BLOCK_MODULES[block[2]]}.{parameter}"
    return f"{MODULES[module]}.{parameter}"


def parameters_not_in_gpt2(model: GPT) -> list[str]:
    """Return the names of the parameters that GPT-2 does not have."""
    modules = {name: name.removesuffix(".bias") for name in named_slices(model)}
    return [
        name
        for name, module in modules.items()
        if module not in MODULES and re.sub(r"^blocks\.\d+\.", "", module) not in BLOCK_MODULES
    ]


def gpt2_slices(model: GPT) -> dict[str, list[Tensor]]:
    """Return every parameter of a GPT-2 by GPT-2's name, as a list of slices of its rows.

    The slices are views of the parameters, as in `named_slices`, in any layout.
    """
    named = {}
    for name, slices in named_slices(model).items():
        named.setdefault(gpt2_name(name), []).extend(slices)
    return named


@torch.no_grad()
def gpt2_tensors(model: GPT) -> dict[str, Tensor]:
    """Return a copy of every parameter by GPT-2's name, with linear layers (out, in)."""
    return {name: torch.cat(slices) for name, slices in gpt2_slices(model).items()}
