"""The device to compute on, the dtype of matrix products, and the environment of a run."""

import contextlib
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.console import ResourceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Runtime:
    """The device, and the dtype of matrix products there.

    In training, weights, optimizer state and loss are float32.
    """

    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.device.type}, {str(self.dtype).removeprefix('torch.')}"

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context for forward passes: autocast to `dtype`, or nothing for float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def select_runtime(device: str, dtype: str) -> Runtime:
    """Select the device and dtype that the settings name.

    The device `auto` is CUDA if there is a GPU for it, else the CPU: no Mac has been measured. The
    dtype `auto` is the fastest one on the device, not any that it supports. Raises ResourceError
    for a device that is missing or too old.
    """
    cuda = torch.cuda.is_available() and not gpu_is_too_old(
        torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    )
    usable = {"cuda": cuda, "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [name for name, is_usable in usable.items() if is_usable]
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if device not in available:
        raise ResourceError(
            f"device: no {device.upper()} device on this machine that this build of PyTorch can "
            f"use; available: {', '.join(available)}; use --device=auto"
        )
    if dtype == "auto":
        is_fast = device == "cpu" and cpu_is_fast_in_bfloat16()
        if device == "cuda":
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if is_fast else "float32"
    return Runtime(torch.device(device), DTYPES[dtype])


def gpu_is_too_old(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Return whether a GPU is older than every one that a build of PyTorch was made for.

    `arch_list` is that of `torch.cuda.get_arch_list`: sm_75 runs from capability 7.5 on.
    """
    built_for = [int(number) for number in re.findall(r"\bsm_(\d+)", " ".join(arch_list))]
    return 10 * capability[0] + capability[1] < min(built_for, default=0)


def cpu_is_fast_in_bfloat16() -> bool:
    """Return whether the CPU has AMX, or has AVX512-BF16 and is not made by Intel.

    On an Intel CPU without AMX, a matrix product took twice as long as in float32. Nobody has
    measured one on Arm, where other programs report products that are many times slower.
    """
    has = torch.cpu.get_capabilities().get
    has_amx = has("amx_bf16") or has("amx_tile")
    return bool(has_amx or (has("avx512_bf16") and "Intel" not in cpu_info("vendor_id")))


def cpu_info(key: str) -> str:
    """Return an entry of /proc/cpuinfo, such as "model name"; elsewhere Python's name for it."""
    with contextlib.suppress(OSError):
        if match := re.search(rf"^{key}.*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def environment(runtime: Runtime, ranks: int) -> str:
    """Describe what must stay the same for a bit-exact resume, besides settings and text.

    Libraries choose their kernels by the CPU or GPU, and the order of a sum by the threads.
    """
    cuda = runtime.device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else cpu_info("model name")
    capability = torch.backends.cpu.get_cpu_capability()
    threads = f"{torch.get_num_threads()} threads, {ranks} ranks"
    return f"torch {torch.__version__}, {device}, {capability}, {runtime}, {threads}"
