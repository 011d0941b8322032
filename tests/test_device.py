"""Choice of device, dtype and kernel: `auto`, and errors that list the available ones."""

import itertools
import platform
import subprocess
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

from common.errors import ResourceError
from configs.schema import KERNELS, LAYOUTS, ModelConfig
from convert import GPT2
from model.attention import MultiHeadAttention
from model.gpt import GPT
from model.inspect import attention_maps
from tests.conftest import ROOT
from training.device import select_runtime


@pytest.fixture
def simulate_devices(monkeypatch):
    """A function that simulates a machine: `simulate_devices("cuda")` has CUDA and a CPU."""

    def has(*devices):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in devices)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in devices)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
        )

    return has


def test_an_unavailable_device_is_rejected_with_the_available_ones(simulate_devices):
    simulate_devices("mps")
    message = "^device: no CUDA device on this machine; available: mps, cpu; use --device=auto"
    with pytest.raises(ResourceError, match=message) as caught:
        select_runtime("cuda", "auto")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("has, expected", [(["mps"], "cpu"), (["cuda", "mps"], "cuda")])
def test_auto_selects_cuda_if_there_is_one_else_the_cpu(simulate_devices, has, expected):
    simulate_devices(*has)
    assert select_runtime("auto", "float32").device.type == expected


def test_on_a_mac_the_line_of_the_device_names_mps_unless_a_device_was_chosen(simulate_devices):
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_reused_by_the_next_step():
    script = """
import resource, torch
from training.device import keep_freed_memory
keep_freed_memory()
def step():
    return sum(each.sum() for each in [torch.ones(2**21) for _ in range(6)])  # 48 MB
step(), step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(), step(), step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True)
    assert int(done.stdout) < 36_864 / 4, "page faults; 36,864 if no memory is reused"


class OnTheCpu(TorchFunctionMode):
    """A check that the result of every function is on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device.type == "cpu", function
        return result


def test_no_layout_or_kernel_leaves_a_tensor_on_the_default_device():
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
