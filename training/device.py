"""The device to compute on, the dtype of matrix products, and the environment of a run."""

import contextlib
import ctypes
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ResourceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Runtime:
    """The device, and the dtype of matrix products there.

    In training, weights, optimizer state and loss are float32. `reason` says why this dtype.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{self.device.type}, {dtype_name(self.dtype)} ({self.reason})"

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context for forward passes: autocast to `dtype`, or nothing for float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def select_runtime(device: str, dtype: str) -> Runtime:
    """Select the device and dtype that the settings name.

    The device `auto` is CUDA if there is a GPU for it, else the CPU: no Mac has been measured. The
    dtype `auto` is the fastest one on the device. Raises ResourceError for a device that is missing
    or too old.
    """
    available = available_devices()
    old_gpu = "cuda" in available and is_too_old(
        torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    )
    name = device
    if device == "auto":
        name = "cuda" if "cuda" in available and not old_gpu else "cpu"
    if name not in available:
        raise ResourceError(
            f"device: no {name.upper()} device on this machine; "
            f"available: {', '.join(available)}; use --device=auto"
        )
    if name == "cuda" and old_gpu:
        raise ResourceError(
            f"device: {torch.cuda.get_device_name()} is too old for this build of PyTorch; "
            "use --device=cpu, or install a build for it"
        )

    reason = "as set"
    if dtype == "auto":
        dtype, reason = _fast_dtype(name)
    if device == "auto" and old_gpu:
        reason += f"; {torch.cuda.get_device_name()} is too old for this build of PyTorch"
    if device == "auto" and "mps" in available:
        reason += "; mps is here too, unmeasured: --device=mps"
    return Runtime(torch.device(name), DTYPES[dtype], reason)


def available_devices() -> list[str]:
    """Return the names of the devices of this machine."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    return [name for name in available if available[name]]


def is_too_old(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Return whether a GPU is older than every one that a build of PyTorch was made for.

    `arch_list` is that of `torch.cuda.get_arch_list`: sm_75 runs from capability 7.5 on.
    """
    built_for = [int(match[1]) for match in map(re.compile(r"sm_(\d+)").match, arch_list) if match]
    major, minor = capability
    return bool(built_for) and 10 * major + minor < min(built_for)


def _fast_dtype(device: str) -> tuple[str, str]:
    """Return the fastest dtype on a device, not any that it supports, and the reason."""
    if device == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "this GPU has bfloat16 instructions"
        return "float32", "this GPU has no bfloat16 instructions"
    if device == "cpu":
        if _cpu_is_fast_in_bfloat16():
            return "bfloat16", "faster than float32 on this CPU"
        return "float32", "bfloat16 is not faster on this CPU"
    return "float32", "the safe choice on this device"


def _cpu_is_fast_in_bfloat16() -> bool:
    """Return whether the CPU has AMX or Arm's BF16, or has AVX512-BF16 and is not made by Intel.

    On an Intel CPU without AMX, a matrix product took twice as long as in float32. Arm is untested.
    """
    # AMX and Arm's BF16 multiply matrices; AVX512-BF16 multiplies vectors, slowly on Intel's CPUs
    capabilities = torch.cpu.get_capabilities()
    if any(capabilities.get(name) for name in ("amx_bf16", "amx_tile", "bf16")):
        return True
    return bool(capabilities.get("avx512_bf16")) and "Intel" not in cpu_info("vendor_id")


def cpu_info(key: str) -> str:
    """Return an entry of /proc/cpuinfo, such as "model name"; elsewhere Python's name for it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(runtime: Runtime, ranks: int) -> dict[str, str]:
    """Return what must stay the same for a bit-exact resume, besides settings and text.

    Libraries choose their kernels by the CPU or GPU, and the order of a sum by the threads.
    """
    cuda = runtime.device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if cuda else cpu_info("model name"),
        "dtype": dtype_name(runtime.dtype),
        "threads": str(torch.get_num_threads()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "ranks": str(ranks),
    }


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next step, which needs the same amount.

    By default it returns large blocks to the system, which zeroes every page of them before it
    hands them out again (mallopt(3)). Does nothing with other C libraries.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        # glibc up to 2.34 refuses thresholds above 32 MiB
        if not libc.mallopt(mmap_threshold, 2**30):
            libc.mallopt(mmap_threshold, 2**25)
        libc.mallopt(trim_threshold, 2**31 - 1)
