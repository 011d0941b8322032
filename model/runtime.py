"""The device to compute on, and the dtype of matrix products."""

import contextlib
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ResourceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Runtime:
    """The device, and the dtype of matrix products there.

    In training, weights, optimizer state and loss are always float32. `reason` explains the choice
    of the dtype.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{self.device.type}, {dtype_name(self.dtype)} ({self.reason})"

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context for forward passes: autocast to `dtype`, nothing for float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def select_runtime(device: str, dtype: str) -> Runtime:
    """Select the device and dtype that the settings name, and for `auto` the best available.

    Raises ResourceError if this machine does not have them.
    """
    available = available_devices()
    name = available[0] if device == "auto" else device
    if name not in available:
        raise ResourceError(
            f"device: no {name.upper()} device on this machine; "
            f"available: {', '.join(available)}; use device: auto"
        )
    if dtype == "auto":
        dtype, reason = _fast_dtype(name)
    else:
        reason = "as set"
    return Runtime(torch.device(name), DTYPES[dtype], reason)


def available_devices() -> list[str]:
    """Return the devices of this machine, the fastest first."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    return [name for name in available if available[name]]


def _fast_dtype(device: str) -> tuple[str, str]:
    """Return the dtype for `auto` on a device, and the reason."""
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
    """Return whether the CPU has AMX, Arm's BF16, or AVX512-BF16 and is not made by Intel.

    On the Intel CPU without AMX that we measured, bfloat16 matrix products take twice as long as
    float32 ones (docs/log.md). Arm CPUs have not been measured.
    """
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        if any(capabilities.get(name) for name in ("amx_bf16", "amx_tile", "bf16")):
            return True
        has_avx512_bf16 = bool(capabilities.get("avx512_bf16"))
    else:  # before torch 2.11
        if torch.cpu._is_amx_tile_supported():
            return True
        has_avx512_bf16 = torch.cpu._is_avx512_bf16_supported()
    return has_avx512_bf16 and "Intel" not in cpu_info("vendor_id")


def cpu_info(key: str) -> str:
    """Return the entry `key` of /proc/cpuinfo, or else platform.processor().

    On Windows, platform.processor() contains the vendor. The "model name" identifies the CPU in
    checkpoints, because libraries choose their kernels by it.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
