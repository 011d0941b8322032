"""The parameters of a model by names and shapes that do not depend on the attention layout.

Initialization, optimizers, checkpoints, the page and convert.py see a model in this way. So a run
may be resumed in another layout, and a seed trains the same model in all of them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from model.attention import QKVProjection

# given a whole tensor, yields each parameter that stores a piece of it, with that piece as a view
Parts = Callable[[Tensor], Iterable[tuple[nn.Parameter, Tensor]]]


def tensor_parts(model: nn.Module) -> dict[str, tuple[tuple[int, ...], Parts]]:
    """Return the tensors of a GPT, or of a part of one, by name: their shapes and parts.

    The names are paths of parameters without `.weight`. Attention has one tensor for queries, keys
    and values, `blocks.0.attention.qkv` (3, H, D, C), whatever its layout, and with biases
    `blocks.0.attention.qkv.bias` (3, H, D). Any other tensor is one parameter.
    """
    layouts, tensors = {}, {}
    for path, module in model.named_modules():
        if isinstance(module, QKVProjection):
            layouts |= dict.fromkeys(module.parameters(), (path, module))
    for name, parameter in model.named_parameters():
        if parameter in layouts:
            path, layout = layouts[parameter]
            for kind, shape in layout.shapes.items():
                qkv = f"{path}.{kind}".removesuffix(".weight")
                tensors[qkv] = shape, partial(layout.parts, kind=kind)
        else:
            tensors[name.removesuffix(".weight")] = parameter.shape, partial(_whole, parameter)
    return tensors


def _whole(parameter: nn.Parameter, tensor: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    return [(parameter, tensor)]


@torch.no_grad()
def named_tensors(
    model: nn.Module, values: Mapping[nn.Parameter, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return a copy of each tensor by name: of its parameters, or of their `values`, if any."""
    like = next(model.parameters())
    values = {p: p for p in model.parameters()} if values is None else values
    tensors = {}
    for name, (shape, parts) in tensor_parts(model).items():
        tensor = like.new_empty(shape)
        for parameter, part in parts(tensor):
            if parameter in values:
                part.copy_(values[parameter].reshape(part.shape))
                tensors[name] = tensor
    return tensors


@torch.no_grad()
def set_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    values: Mapping[nn.Parameter, Tensor] | None = None,
) -> None:
    """Copy tensors into the parameters, or into their `values`: the inverse of `named_tensors`."""
    all_parts = tensor_parts(model)
    for name, tensor in tensors.items():
        _, parts = all_parts[name]
        for parameter, part in parts(tensor):
            target = parameter if values is None else values[parameter]
            target.copy_(part.reshape(parameter.shape))


def parameter_count(model: nn.Module) -> int:
    """Count the parameters without position embeddings, as nanoGPT does."""
    positions = model.position_embedding
    not_counted = 0 if positions is None else positions.weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - not_counted
