"""Where and how a run computes: device, dtype, autocast, ranks, and the fingerprint of it that a
checkpoint keeps.
"""

import contextlib
import ctypes
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from common.errors import ResourceError
from training.distributed import ALONE, Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """The device and the dtype of its matrix products. Weights, optimizer and loss are float32 in
    every case.

    `ranks` are the processes of the run, each with a device of its own.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str
    ranks: Ranks = ALONE

    def __str__(self) -> str:
        among = (
            ""
            if self.ranks.alone
            else f", {self.ranks.size} processes on {self.ranks.machines} machine(s)"
        )
        return (
            f"{self.device.type}, {str(self.dtype).removeprefix('torch.')} ({self.reason}){among}"
        )

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context for forward passes: matrix products in `dtype`, the rest as PyTorch's
        autocast has it.
        """
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @cached_property
    def peak(self) -> float:
        """Operations a second in large matrix products, measured: what the speed of training can be
        compared with.
        """
        size = 8192 if self.device.type == "cuda" else 512
        matrix = torch.ones(size, size, dtype=self.dtype, device=self.device)
        seconds = []
        for _ in range(20):  # the first ones warm up
            began = time.perf_counter()
            (matrix @ matrix)[0, 0].item()  # which waits for it
            seconds.append(time.perf_counter() - began)
        return 2 * size**3 / min(seconds)

    def environment(self) -> dict[str, str | int]:
        """What a bit-exact resume needs to be the same."""
        return {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "device": self.device.type,
            "device_name": torch.cuda.get_device_name()
            if self.device.type == "cuda"
            else _cpu_name(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "ranks": self.ranks.size,
        }


def choose(device: str, dtype: str, ranks: Ranks = ALONE) -> Runtime:
    """The Runtime that the settings name; ResourceError (exit 5) where this machine does not have
    it.
    """
    mps = (
        torch.backends.mps.is_available() and ranks.alone
    )  # PyTorch's distributed engine does not know it
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": mps}
    name = (
        next(each for each in ("cuda", "mps", "cpu") if available[each])
        if device == "auto"
        else device
    )
    if not available[name]:
        fits = ", ".join(each for each in available if available[each])
        raise ResourceError(
            f"device: no {name.upper()} device on this machine; available: {fits}; use device: auto"
        )
    gpus = torch.cuda.device_count()
    if name == "cuda" and not ranks.alone and ranks.on_machine > gpus:
        raise ResourceError(
            f"device: {ranks.on_machine} processes on this machine are more than its {gpus} GPUs; "
            f"allowed: one each; use torchrun --nproc_per_node={gpus}, or device: cpu"
        )
    if dtype == "auto":
        dtype, reason = _fast_dtype(name)
    else:
        reason = "as set"
    if dtype == "float16" and name == "cpu":
        raise ResourceError(
            "dtype: float16 does not train on a CPU; allowed: float32, bfloat16; use dtype: auto"
        )
    if name == "cuda" and not ranks.alone:
        torch.cuda.set_device(ranks.local)
    return Runtime(torch.device(name), DTYPES[dtype], reason, ranks)


def keep_memory() -> None:
    """Have the C library keep the memory that is freed, for the next step takes as much again.

    By default glibc returns large pieces to the system, which hands them out anew page by page,
    each filled with zeros at the first touch. Elsewhere than in glibc nothing changes (mallopt(3)).
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def _fast_dtype(device: str) -> tuple[str, str]:
    if device == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "this GPU has bfloat16 instructions"
        return "float32", "this GPU has no bfloat16 instructions"
    if device == "cpu":
        if _cpu_has_bf16():
            return "bfloat16", "this CPU has bfloat16 instructions"
        return "float32", "this CPU has no bfloat16 instructions"
    return "float32", "the safe choice on this device"


def _cpu_has_bf16() -> bool:
    """Instructions that multiply bfloat16: AVX512-BF16 or AMX on x86, BF16 on Arm."""
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(
            capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "amx_tile", "bf16")
        )
    return torch.cpu._is_avx512_bf16_supported()


def _cpu_name() -> str:
    """Libraries choose their kernels by the model of the processor, not by its
    instructions alone.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def compiled(
    model: torch.nn.Module, say: Callable[[str], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`torch.compile` of the model; where that fails, at whichever call, the model itself and one
    line.
    """
    faster = torch.compile(model)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        nonlocal faster
        try:
            return faster(ids)
        except Exception as error:  # the compiler's errors have no common base
            if faster is model or isinstance(error, torch.OutOfMemoryError):
                raise
            faster = model
            say(f"torch.compile failed ({type(error).__name__}); going on without it")
            return model(ids)

    return forward


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """What the default generator is seeded with at each step, so that dropout needs no
    saved state.
    """
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
