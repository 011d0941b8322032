"""The parameters of a model by names and shapes that do not depend on the attention layout.

Conversion, checkpoints, Muon and the page see a model in this way.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from model.attention import identity
from model.gpt import GPT

QKV_NAMES = ("query", "key", "value", "query.bias", "key.bias", "value.bias")


def named_slices(
    model: GPT, tensor_of: Callable[[Tensor], Tensor] = identity
) -> dict[str, list[Tensor]]:
    """Return every parameter by name, as a list of slices of its rows.

    The names are paths of parameters without `.weight`, but attention has `query`, `key` and
    `value` instead of the layout's parameters. A query, key or value has one slice per head, any
    other parameter a single one:

        {"token_embedding": [(V, C)], "blocks.0.attention.query": [head 0's (D, C), ...], ...}

    `torch.cat(slices)` is the same tensor in every layout. The slices are views of
    `tensor_of(parameter)`: by default of the parameter itself, else of a tensor of its shape, such
    as its momentum.
    """
    slices = {}
    for name, parameter in model.named_parameters():
        # attention: the layout's parameters become heads; all other parameters stay whole
        block, separator, _ = name.partition(".attention.projection.")
        if not separator:
            # also a parameter of your own that is a single number: one row
            slices[name.removesuffix(".weight")] = [torch.atleast_1d(tensor_of(parameter))]
        elif f"{block}.attention.query" not in slices:
            projection = model.get_submodule(f"{block}.attention.projection")
            heads = [projection.head_weights(h, tensor_of) for h in range(projection.n_head)]
            # without biases, only the first three names apply
            for part, per_head in zip(QKV_NAMES, zip(*heads, strict=True), strict=False):
                slices[f"{block}.attention.{part}"] = list(per_head)
    return slices


@torch.no_grad()
def load_tensors(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Copy in the parameters: `tensors` has one whole tensor per name of `named_slices`."""
    for name, slices in named_slices(model).items():
        copy_slices(tensors[name], slices)


def copy_slices(source: Tensor, slices: Sequence[Tensor]) -> None:
    """Copy a whole tensor into the views that store its slices (see `named_slices`)."""
    parts = source.split([len(view) for view in slices])
    for view, part in zip(slices, parts, strict=True):
        view.copy_(part)


def parameter_count(model: GPT) -> int:
    """Count the parameters without position embeddings, as nanoGPT does."""
    positions = model.position_embedding
    not_counted = 0 if positions is None else positions.weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - not_counted


# ------------------------------------------------------------------------------- for the optimizers


def block_matrices(
    model: GPT, tensor_of: Callable[[Tensor], Tensor] = identity
) -> list[list[Tensor]]:
    """Return the matrices of all blocks, which Muon updates, each as a list of slices.

    The slices are those of `named_slices`: in every layout those of a matrix have two dimensions,
    those of a bias or of a norm's weight have one.
    """
    return [
        slices
        for name, slices in named_slices(model, tensor_of).items()
        if name.startswith("blocks.") and slices[0].dim() == 2
    ]


def block_parameters(model: GPT) -> list[nn.Parameter]:
    """Return the parameters that Muon updates: those that hold the matrices of all blocks.

    The weights of an attention layout are such parameters, whatever their shape.
    """
    found = []
    for name, parameter in model.named_parameters():
        in_layout = ".attention.projection." in name and ".bias" not in name
        if name.startswith("blocks.") and (in_layout or parameter.dim() == 2):
            found.append(parameter)
    return found


def embeddings_and_lm_head(model: GPT) -> list[nn.Parameter]:
    """Return the matrices outside the blocks; lm_head only if it is not tied."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if not name.startswith("blocks.") and parameter.dim() == 2
    ]
