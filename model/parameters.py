"""The parameters of a model by names and shapes that do not depend on the attention layout.

Checkpoints, Muon, the page and convert.py see a model in this way. So a run may be resumed in
another layout, and a seed trains the same model in all of them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from model.attention import QKVProjection
from model.gpt import GPT


def named_slices(
    model: GPT, tensors: Mapping[nn.Parameter, Tensor] | None = None
) -> dict[str, list[Tensor]]:
    """Return every parameter by name, as a list of slices: ranges of its rows.

    The names are paths of parameters without `.weight`. In attention they are `query`, `key` and
    `value`, whatever the layout calls its parameters; these have a slice per head, any other
    parameter has a single one:

        {"token_embedding": [(V, C)], "blocks.0.attention.query": [head 0's (D, C), ...], ...}

    `torch.cat(slices)` is the same tensor in every layout. The slices are views, so writing to them
    changes the model.

    With `tensors`, which maps parameters to tensors of their shapes, such as their momentum, these
    are sliced instead. Parameters without one are left out.
    """
    if tensors is None:
        tensors = {parameter: parameter for parameter in model.parameters()}
    slices = {}
    for name, parameter in model.named_parameters():
        if parameter not in tensors:
            continue
        if ".attention.projection." not in name:
            # atleast_1d: a scalar parameter, should you add one, is one row
            slices[name.removesuffix(".weight")] = [torch.atleast_1d(tensors[parameter])]
            continue

        block = name.partition(".attention.projection.")[0]
        # the first weight of a layout brings all its weights, the first bias all its biases
        is_weight = parameter.dim() > 1
        names = [
            f"{block}.attention.{part}" if is_weight else f"{block}.attention.{part}.bias"
            for part in ("query", "key", "value")
        ]
        if names[0] not in slices:
            projection = model.get_submodule(f"{block}.attention.projection")
            by_part = list(zip(*all_head_weights(projection, tensors), strict=True))
            parts = by_part[:3] if is_weight else by_part[3:]
            for part_name, heads in zip(names, parts, strict=True):
                slices[part_name] = list(heads)
    return slices


class AllHeads(nn.Module):
    """The weights of all heads of a layout, as a module, since functional_call takes only those."""

    def __init__(self, projection: QKVProjection):
        super().__init__()
        self.projection = projection

    def forward(self) -> list[list[Tensor]]:
        return [self.projection.head_weights(h) for h in range(self.projection.n_head)]


def all_head_weights(
    projection: QKVProjection, tensors: Mapping[nn.Parameter, Tensor]
) -> list[list[Tensor]]:
    """Return `head_weights` of every head, with `tensors` in place of the layout's parameters.

    So gradients and moments are cut as the weights are. A parameter without a tensor stays.
    """
    replaced = {
        f"projection.{name}": tensors[parameter]
        for name, parameter in projection.named_parameters()
        if parameter in tensors
    }
    return functional_call(AllHeads(projection), replaced, ())


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
