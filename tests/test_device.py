"""Choice of device, dtype and kernel: `auto`, and errors that list the available ones."""

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode

from common.console import ResourceError
from configs.schema import KERNELS, LAYOUTS, ModelConfig
from convert import GPT2
from model.attention import MultiHeadAttention
from model.gpt import GPT
from model.inspect import attention_maps
from training.device import is_too_old, select_runtime

# the builds of PyTorch 2.11 for CUDA 13
BUILDS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("devices", "capability", "device", "dtype", "found"),
    [
        ("cuda mps", (9, 0), "auto", "auto", "cuda, float32"),  # it emulates bfloat16
        ("mps", (9, 0), "auto", "float32", "cpu, float32"),
        ("cuda", (6, 1), "auto", "float32", "cpu, float32"),  # too old
        ("mps", (9, 0), "cuda", "auto", None),
        ("mps cuda", (6, 1), "cuda", "auto", None),
    ],
)
def test_device(devices, capability, device, dtype, found, monkeypatch):
    """`auto` is CUDA if there is a GPU for it, else the CPU; what is not there is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in devices)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in devices)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILDS)
    if found:
        assert str(select_runtime(device, dtype)) == found
        return
    message = r"^device: no CUDA device .*; available: mps, cpu; use --device=auto"
    with pytest.raises(ResourceError, match=message):
        select_runtime(device, dtype)


def test_device_too_old():
    """If its capability is below every build of this torch."""
    assert is_too_old((6, 1), BUILDS)  # GTX 10xx, P100
    assert not is_too_old((8, 9), BUILDS)  # RTX 40: a newer minor version runs
    assert not is_too_old((12, 0), BUILDS)
    assert not is_too_old((9, 0), ["sm_90a"])
    assert not is_too_old((6, 1), ["gfx90a"])  # not NVIDIA's


@pytest.mark.parametrize(
    ("vendor", "instructions", "dtype"),
    [
        ("AuthenticAMD", [], torch.float32),
        ("AuthenticAMD", ["avx512_bf16"], torch.bfloat16),
        ("GenuineIntel", ["avx512_bf16"], torch.float32),
        ("GenuineIntel", ["avx512_bf16", "amx_bf16", "amx_tile"], torch.bfloat16),
        ("aarch64", ["bf16"], torch.float32),
    ],
)
def test_dtype_auto(monkeypatch, vendor, instructions, dtype):
    """bfloat16 only with fast native instructions."""
    monkeypatch.setattr("training.device.cpu_info", {"vendor_id": vendor}.get)
    capabilities = dict.fromkeys(instructions, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert select_runtime("cpu", "auto").dtype == dtype
    assert select_runtime("cpu", "float32").dtype == torch.float32


class OnTheCpu(TorchFunctionMode):
    """A check that the result of every function is on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device.type == "cpu", function
        return result


def test_device_of_the_inputs():
    """Every layout and kernel computes there."""
    ids, x, context = torch.zeros(3, 8).long(), torch.ones(3, 4, 8), torch.ones(3, 5, 8)
    own, cross = torch.ones(4, 4).bool(), torch.ones(3, 2, 4, 5).bool()
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
    pairs = zip(LAYOUTS, itertools.cycle(KERNELS), itertools.cycle([GPT2, {}]), strict=False)
    for layout, kernel, variant in pairs:
        model = GPT(ModelConfig(**sizes, **variant, layout=layout, kernel=kernel), 11).eval()
        layer = MultiHeadAttention(8, 2, layout=layout, kernel=kernel)
        cache = model.new_cache()
        # as on a GPU, the device of the inputs is not that of a tensor made without one
        with OnTheCpu(), torch.device("meta"):
            model(ids)
            attention_maps(model, ids[0])
            for part in ids.split([3, 1, 4], dim=1):
                model(part, cache)
            layer(x, context)
            layer(x, causal=True)
            layer(x, mask=own)
            layer(x, context, mask=cross)
