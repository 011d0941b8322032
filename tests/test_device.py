"""Choice of device and dtype; the device that a model computes on."""

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode

from configs.schema import KERNELS, LAYOUTS
from convert import GPT2
from model.inspect import attention_maps
from tests.variants import random_model
from training.device import gpu_is_too_old, select_runtime

DEVICES = [  # those that are there, the GPU's capability, the setting, what is chosen
    ("cuda", (8, 9), "auto", "cuda, bfloat16"),
    ("cuda", (7, 5), "auto", "cuda, float32"),  # it only emulates bfloat16
    ("cuda mps", (6, 1), "auto", "cpu, float32"),  # too old
    ("cuda mps", (8, 9), "mps", "mps, float32"),
]


@pytest.mark.parametrize(("devices", "capability", "device", "found"), DEVICES)
def test_device(devices, capability, device, found, monkeypatch):
    """`auto` is CUDA if there is a GPU for it, else the CPU."""

    def is_bf16_supported(including_emulation):
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in devices)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in devices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_120"])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert str(select_runtime(device, "auto")) == found


def test_device_of_amd():
    """It is never too old: its architectures have other names."""
    assert not gpu_is_too_old((6, 1), ["gfx90a"])


CPUS = [  # vendor, instructions, the fastest dtype
    ("AuthenticAMD", [], torch.float32),
    ("AuthenticAMD", ["avx512_bf16"], torch.bfloat16),
    ("GenuineIntel", ["avx512_bf16"], torch.float32),
    ("GenuineIntel", ["avx512_bf16", "amx_bf16"], torch.bfloat16),
]


@pytest.mark.parametrize(("vendor", "instructions", "dtype"), CPUS)
def test_dtype_of_a_cpu(vendor, instructions, dtype, monkeypatch):
    """bfloat16 only with fast native instructions."""
    monkeypatch.setattr("training.device.cpu_info", {"vendor_id": vendor}.get)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True))
    assert select_runtime("cpu", "auto").dtype == dtype


class OnTheCpu(TorchFunctionMode):
    """A check that the result of every function is on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device.type == "cpu", function
        return result


def test_device_of_the_inputs():
    """Every layout and kernel computes there."""
    ids = torch.zeros(3, 8).long()
    pairs = zip(LAYOUTS, itertools.cycle(KERNELS), itertools.cycle([GPT2, {}]), strict=False)
    for layout, kernel, variant in pairs:
        model = random_model(**variant, layout=layout, kernel=kernel)
        cache = model.new_cache()
        # as on a GPU, the device of the inputs is not that of a tensor made without one
        with OnTheCpu(), torch.device("meta"):
            attention_maps(model, ids[0])
            for part in ids.split([3, 1, 4], dim=1):
                model(part, cache)
