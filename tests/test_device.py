"""Choice of device, dtype and kernel: `auto`, and errors that list the available ones."""

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode

from common.errors import ResourceError
from configs.schema import KERNELS, LAYOUTS, ModelConfig
from convert import GPT2
from model.attention import MultiHeadAttention
from model.gpt import GPT
from model.inspect import attention_maps
from training.device import is_too_old, select_runtime


@pytest.fixture
def simulate_devices(monkeypatch):
    """A function that simulates a machine: `simulate_devices("cuda")` has CUDA and a CPU."""

    def has(*devices):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in devices)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in devices)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    return has


def test_an_unavailable_device_is_refused_with_the_available_ones(simulate_devices):
    simulate_devices("mps")
    message = "^device: no CUDA device on this machine; available: mps, cpu; use --device=auto"
    with pytest.raises(ResourceError, match=message) as caught:
        select_runtime("cuda", "auto")
    assert caught.value.exit_code == 5


def test_auto_selects_cuda_if_there_is_one_else_the_cpu_and_says_that_mps_is_here_too(
    simulate_devices,
):
    simulate_devices("cuda", "mps")
    assert select_runtime("auto", "float32").device.type == "cuda"
    simulate_devices("mps")
    line = "cpu, float32 (as set; mps is here too, unmeasured: --device=mps)"
    assert str(select_runtime("auto", "float32")) == line
    assert str(select_runtime("cpu", "float32")) == "cpu, float32 (as set)"


@pytest.mark.parametrize(
    "vendor, instructions, dtype",
    [
        ("AuthenticAMD", [], torch.float32),
        ("AuthenticAMD", ["avx512_bf16"], torch.bfloat16),
        ("GenuineIntel", ["avx512_bf16"], torch.float32),
        ("GenuineIntel", ["avx512_bf16", "amx_bf16", "amx_tile"], torch.bfloat16),
        ("aarch64", ["bf16"], torch.bfloat16),
    ],
)
def test_auto_selects_bfloat16_only_with_fast_native_instructions(
    monkeypatch, vendor, instructions, dtype
):
    monkeypatch.setattr("training.device.cpu_info", {"vendor_id": vendor}.get)
    capabilities = dict.fromkeys(instructions, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert select_runtime("cpu", "auto").dtype == dtype
    assert select_runtime("cpu", "float32").dtype == torch.float32


def test_a_gpu_that_emulates_bfloat16_computes_in_float32(simulate_devices):
    simulate_devices("cuda")
    assert select_runtime("cuda", "auto").dtype == torch.float32


# the builds of PyTorch 2.11 for CUDA 13
BUILDS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def test_a_gpu_is_too_old_if_its_capability_is_below_every_build_of_this_torch():
    assert is_too_old((6, 1), BUILDS)  # GTX 10xx, P100
    assert not is_too_old((8, 9), BUILDS)  # RTX 40: a newer minor version runs
    assert not is_too_old((12, 0), BUILDS)
    assert not is_too_old((9, 0), ["sm_90a"])
    assert not is_too_old((6, 1), ["gfx90a"])  # not NVIDIA's


def test_a_gpu_that_is_too_old_is_left_alone_by_auto_and_refused_by_name(monkeypatch):
    monkeypatch.setattr("training.device.available_devices", lambda: ["cuda", "cpu"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILDS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P100")
    runtime = select_runtime("auto", "float32")
    assert runtime.device.type == "cpu"
    assert str(runtime).endswith("; Tesla P100 is too old for this build of PyTorch)")
    with pytest.raises(ResourceError, match=r"^device: Tesla P100 is too old .*--device=cpu"):
        select_runtime("cuda", "float32")


class OnTheCpu(TorchFunctionMode):
    """A check that the result of every function is on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device.type == "cpu", function
        return result


def test_every_layout_and_kernel_computes_on_the_device_of_its_inputs():
    ids, x, context = torch.zeros(3, 8).long(), torch.ones(3, 4, 8), torch.ones(3, 5, 8)
    boolean, additive = torch.ones(4, 4).bool(), torch.ones(3, 2, 4, 5)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
    pairs = itertools.product(LAYOUTS, KERNELS)
    for (layout, kernel), variant in zip(pairs, itertools.cycle([GPT2, {}]), strict=False):
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
            layer(x, mask=boolean)
            layer(x, context, mask=additive)
