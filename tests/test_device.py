"""Choice of device, dtype and kernel: `auto`, and errors that list the available ones."""

import platform
import re
import subprocess
import sys

import pytest
import torch

from common.errors import ResourceError
from tests.runs import raised
from training.device import select_runtime


@pytest.fixture
def simulate_devices(monkeypatch):
    """Return a function that simulates a machine: `simulate_devices("cuda")` has CUDA and a CPU."""

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


@pytest.mark.parametrize(
    "has, expected", [([], "cpu"), (["cuda"], "cuda"), (["mps"], "cpu"), (["cuda", "mps"], "cuda")]
)
def test_auto_selects_cuda_if_there_is_one_else_the_cpu(simulate_devices, has, expected):
    simulate_devices(*has)
    assert select_runtime("auto", "float32").device.type == expected


def test_on_a_mac_the_line_of_the_device_names_mps_unless_a_device_was_chosen(simulate_devices):
    simulate_devices("mps")
    line = "cpu, float32 (as set; mps is here too, unmeasured: --device=mps)"
    assert str(select_runtime("auto", "float32")) == line
    assert str(select_runtime("cpu", "float32")) == "cpu, float32 (as set)"
    assert str(select_runtime("mps", "float32")) == "mps, float32 (as set)"


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
    simulate_devices, monkeypatch, vendor, instructions, dtype
):
    simulate_devices("cuda")
    monkeypatch.setattr("training.device.cpu_info", {"vendor_id": vendor}.get)
    capabilities = dict.fromkeys(instructions, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert select_runtime("cpu", "auto").dtype == dtype
    # the simulated GPU only emulates bfloat16
    assert select_runtime("cuda", "auto").dtype == torch.float32
    assert select_runtime("cpu", "float32").dtype == torch.float32


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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(done.stdout) < 36_864 / 4, "page faults; 36,864 if no memory is reused"


def test_torch_compile_that_fails_ends_in_one_line(train_run, monkeypatch):
    fails = raised(RuntimeError("no compiler\ndetails"))
    monkeypatch.setattr(torch, "compile", lambda model: fails)
    code, output = train_run("--compile")
    assert code == 5 and output.endswith(
        "error: compile: torch.compile failed (no compiler); --compile=false trains without it\n"
    )


def test_no_layout_or_kernel_leaves_a_tensor_on_the_cpu(run):
    """Forward passes on a simulated GPU: see tests/simulated_gpu.py."""
    done = run("-m", "tests.simulated_gpu")
    assert re.fullmatch(r"24 models and layers on a simulated device, \w+: .*\n", done.stdout)
