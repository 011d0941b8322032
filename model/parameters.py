"""The parameters of a model by names and shapes that do not depend on the attention layout.

Initialization, optimizers, checkpoints, the page and convert.py see a model in this way. So a run
may be resumed in another layout, and a seed trains the same model in all of them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

Of = Callable[[nn.Parameter], Tensor | None]  # a parameter -> itself, its gradient or a moment


class ParameterSplit(NamedTuple):
    """A tensor of a model, and the parameters that store its parts.

    shape     of the tensor
    matrices  (N, R, C), its shape as N matrices: 3 for queries, keys and values; () for a vector
    parts     maps a tensor of this shape to the parameters, each with its part: a view of it
    """

    shape: tuple[int, ...]
    matrices: tuple[int, ...]
    parts: Callable[[Tensor], Iterable[tuple[nn.Parameter, Tensor]]]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that store the tensor."""
        return [parameter for parameter, _ in self.parts(torch.empty(self.shape, device="meta"))]


def named_splits(model: nn.Module) -> dict[str, ParameterSplit]:
    """Return the tensors of a GPT, or of a part of one, by name.

    The names are paths of parameters without `.weight`. Attention has one tensor for queries, keys
    and values, `blocks.0.attention.qkv` (3, H, D, C), whatever its layout, and with biases
    `blocks.0.attention.qkv.bias` (3, H, D). Any other tensor of more than one dimension is one
    matrix, whose rows are the first dimension.
    """
    splits = {}
    for name, parameter in model.named_parameters():
        # in an attention layer alone, names begin with `projection.`: the dot makes all names alike
        path, in_layout, _ = f".{name}".partition(".projection.")
        if in_layout:
            projection = model.get_submodule(f"{path}.projection"[1:])
            for kind, shape in projection.shapes.items():
                qkv = f"{path}.qkv.{kind}"[1:].removesuffix(".weight")
                matrices = (3, shape[1] * shape[2], shape[3]) if kind == "weight" else ()
                splits[qkv] = ParameterSplit(shape, matrices, partial(projection.split, kind=kind))
        else:
            shape = tuple(parameter.shape)
            matrices = (1, shape[0], math.prod(shape[1:])) if len(shape) > 1 else ()
            whole = partial(_whole, parameter)
            splits[name.removesuffix(".weight")] = ParameterSplit(shape, matrices, whole)
    return splits


def _whole(parameter: nn.Parameter, tensor: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    return [(parameter, tensor)]


@torch.no_grad()
def named_tensors(model: nn.Module, of: Of = lambda parameter: parameter) -> dict[str, Tensor]:
    """Return a copy of each tensor by name, without those whose parameters `of` maps to None."""
    tensors, like = {}, next(model.parameters())
    for name, split in named_splits(model).items():
        tensor = like.new_empty(split.shape)
        parts = [(of(parameter), part) for parameter, part in split.parts(tensor)]
        if parts[0][0] is not None:
            for source, part in parts:
                part.copy_(source.reshape(part.shape))
            tensors[name] = tensor
    return tensors


@torch.no_grad()
def load_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], of: Of = lambda parameter: parameter
) -> None:
    """Copy tensors into what `of` maps the parameters to: the inverse of `named_tensors`."""
    splits = named_splits(model)
    for name, tensor in tensors.items():
        for parameter, part in splits[name].parts(tensor):
            of(parameter).copy_(part.reshape(parameter.shape))


def parameter_count(model: nn.Module) -> int:
    """Count the parameters without position embeddings, as nanoGPT does."""
    positions = model.position_embedding
    not_counted = 0 if positions is None else positions.weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - not_counted
