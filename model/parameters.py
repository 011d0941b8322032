"""The parameters of a model by names and shapes that do not depend on the attention layout.

Checkpoints, Muon, the page and convert.py see a model in this way. So a run may be resumed in
another layout, and a seed trains the same model in all of them.
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
    """Return every parameter by name, as a list of slices: ranges of its rows.

    The names are paths of parameters without `.weight`. In attention they are `query`, `key` and
    `value`, whatever the layout calls its parameters; these have a slice per head, any other
    parameter has a single one:

        {"token_embedding": [(V, C)], "blocks.0.attention.query": [head 0's (D, C), ...], ...}

    `torch.cat(slices)` is the same tensor in every layout. The slices are views, so writing to them
    changes the model. `tensor_of` maps a parameter to the tensor that is sliced: the parameter
    itself, or one of the same shape, such as its momentum.
    """
    slices = {}
    for name, parameter in model.named_parameters():
        block, in_layout, _ = name.partition(".attention.projection.")
        if not in_layout:
            # it stays whole; atleast_1d: a scalar parameter, should you add one, is one row
            slices[name.removesuffix(".weight")] = [torch.atleast_1d(tensor_of(parameter))]
        elif f"{block}.attention.query" not in slices:
            # the first parameter of a layout: take all of the layout, head by head
            projection = model.get_submodule(f"{block}.attention.projection")
            heads = [projection.head_weights(h, tensor_of) for h in range(projection.n_head)]
            # without biases, only the first three names apply
            for part, per_head in zip(QKV_NAMES, zip(*heads, strict=True), strict=False):
                slices[f"{block}.attention.{part}"] = list(per_head)
    return slices


@torch.no_grad()
def load_tensors(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Set the parameters of a model: `tensors` has a whole tensor for each name."""
    for name, slices in named_slices(model).items():
        copy_slices(tensors[name], slices)


def copy_slices(source: Tensor, slices: Sequence[Tensor]) -> None:
    """Copy a whole tensor into the slices that store it (see `named_slices`)."""
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

    The slices are those of `named_slices`. Those of a matrix have two dimensions in every layout,
    those of a bias or of a norm's weight one.
    """
    return [
        slices
        for name, slices in named_slices(model, tensor_of).items()
        if name.startswith("blocks.") and slices[0].dim() == 2
    ]


def block_parameters(model: GPT) -> list[nn.Parameter]:
    """Return the parameters that Muon updates: those that hold the matrices of all blocks."""
    storages = {
        matrix.untyped_storage().data_ptr() for slices in block_matrices(model) for matrix in slices
    }
    return [p for p in model.parameters() if p.untyped_storage().data_ptr() in storages]


def embeddings_and_lm_head(model: GPT) -> list[nn.Parameter]:
    """Return the matrices outside the blocks; lm_head only if it is not tied."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if not name.startswith("blocks.") and parameter.dim() == 2
    ]
