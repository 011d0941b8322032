"""Forward passes on a simulated GPU: a tensor left on the CPU is an error.

    python -m tests.simulated_gpu

FakeTensorMode computes shapes, dtypes and devices, but no values. The device is "cuda" with a CUDA
build of PyTorch; a CPU build has no "cuda", so a device of another name is registered. Backward
passes need a real GPU. Run this in its own process, because the registration is global.
"""

import itertools

import torch
from torch._subclasses import FakeTensorMode  # the only simulation of a device that PyTorch has

from configs.schema import KERNELS, LAYOUTS, ModelConfig
from convert import GPT2
from model.attention import MultiHeadAttention
from model.gpt import GPT
from model.inspect import attention_maps

SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
VARIANTS = (GPT2 | {"dropout": 0.1, "bias": True}, {"mlp": "swiglu", "norm": "rmsnorm"})
V = 11


def simulated_device() -> str:
    if torch.version.cuda:
        return "cuda"
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("simulated")  # device guards for a CPU build
    return "simulated"


def results(device: str, layout: str, kernel: str, variant: dict) -> list[torch.Tensor]:
    """Run full and cached forward passes, attention maps, cross-attention and masked attention."""
    with torch.device(device):  # parameters and inputs, but nothing that forward makes
        model = GPT(ModelConfig(**SIZES, attention=layout, kernel=kernel, **variant), V)
        layer = MultiHeadAttention(8, 2, layout=layout, kernel=kernel, attention_dropout=0.1)
        ids, x, context = torch.zeros(3, 8).long(), torch.empty(3, 4, 8), torch.empty(3, 5, 8)
        boolean, additive = torch.empty(4, 4).bool(), torch.empty(3, 2, 4, 5)
    cache = model.new_cache()
    found = [model(ids), *attention_maps(model.eval(), ids[0])]
    found += [model(ids[:, :3], cache), model(ids[:, 3:4], cache)]  # prefill, then one token
    return [*found, layer(x, context), layer(x, mask=boolean), layer(x, context, mask=additive)]


def main() -> None:
    device, pairs = simulated_device(), list(itertools.product(LAYOUTS, KERNELS))
    for pair, variant in zip(pairs, itertools.cycle(VARIANTS), strict=False):
        with FakeTensorMode():
            found = results(device, *pair, variant)
        assert {result.device.type for result in found} == {device}, pair
    print(f"{len(pairs)} models and layers on a simulated device, {device}: all right")


if __name__ == "__main__":
    main()
