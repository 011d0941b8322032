"""Forward passes on a simulated GPU: a tensor left on the CPU is an error.

    python -m tests.simulated_gpu

FakeTensorMode computes shapes, dtypes and devices, but no values. The device is "cuda" with a CUDA
build of PyTorch; a CPU build has no "cuda", so a device of another name is registered. Backward
passes need a real GPU. Run this in its own process, because the registration is global.
"""

import dataclasses
import itertools

import torch
from torch._subclasses import FakeTensorMode  # the only simulation of a device that PyTorch has

from configs.schema import KERNELS, LAYOUTS, ModelConfig
from convert import GPT2
from model.attention import MultiHeadAttention
from model.gpt import GPT
from model.inspect import attention_maps
from model.kv_cache import new_caches

SMALL = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, bias=True)
VARIANTS = (
    GPT2 | {"dropout": 0.1},
    {"mlp": "swiglu", "norm": "rmsnorm"},
)
V = 11


def simulated_device() -> str:
    if torch.version.cuda:
        return "cuda"
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("simulated")  # device guards for a CPU build
    return "simulated"


def move_(module: torch.nn.Module, device: str) -> None:
    """Replace parameters and buffers by simulated ones; `Module.to` fails on them."""
    for each in module.modules():
        for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if tensor is not None:
                moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                if name in each._buffers:
                    each._buffers[name] = moved
                else:
                    each._parameters[name] = torch.nn.Parameter(moved)


def check_gpt(model: GPT, device: str) -> None:
    """Run full and cached forward passes and attention maps; all results must be on the device."""
    move_(model, device)
    ids = torch.zeros(3, SMALL.block_size, dtype=torch.int64, device=device)
    results = [model(ids), *attention_maps(model.eval(), ids[0])]
    caches = new_caches(model.config)
    for end in (3, 4):  # prefill, then one token
        results.append(model(ids[:, :end], caches))
    shapes = [tuple(result.shape) for result in results]
    assert shapes == [(3, 8, V), (2, 8, 8), (3, 3, V), (3, 1, V)], shapes
    assert {result.device.type for result in results} == {device}


def check_masks(layer: MultiHeadAttention, device: str) -> None:
    """Run cross-attention and masked attention."""
    move_(layer, device)
    x, context = (torch.empty(3, n, 8, device=device) for n in (4, 5))
    for arguments in (
        {"context": context},
        {"mask": torch.empty(4, 4, dtype=torch.bool, device=device)},
        {"context": context, "mask": torch.empty(3, 2, 4, 5, device=device)},
    ):
        y = layer(x, **arguments)
        assert (tuple(y.shape), y.device.type) == ((3, 4, 8), device)


def main() -> None:
    device, pairs = simulated_device(), list(itertools.product(LAYOUTS, KERNELS))
    for (layout, kernel), variant in zip(pairs, itertools.cycle(VARIANTS), strict=False):
        model = GPT(dataclasses.replace(SMALL, attention=layout, kernel=kernel, **variant), V)
        layer = MultiHeadAttention(8, 2, layout=layout, kernel=kernel, attention_dropout=0.1)
        with FakeTensorMode():
            check_gpt(model, device)
            check_masks(layer, device)
    print(f"{len(pairs)} models and layers on a simulated device, {device}: all right")


if __name__ == "__main__":
    main()
