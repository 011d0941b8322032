"""Device, dtype and autocast of a run, and the environment that a checkpoint records."""

import contextlib
import ctypes
import dataclasses
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from common.errors import ResourceError
from configs.fields import Checked, setting
from configs.schema import MAX_BATCHED_CONTEXT, ModelConfig
from training.distributed import SINGLE_PROCESS, World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Environment(Checked):
    """The facts that must stay the same for a bit-exact resume, besides settings and text."""

    torch: str = setting("", "version of PyTorch")
    python: str = setting("", "version of Python")
    device: str = setting("", "type of the device: cpu, cuda or mps")
    device_name: str = setting("", "model of the CPU or GPU")
    dtype: str = setting("", "dtype of matrix products")
    threads: int = setting(1, "threads of PyTorch on the CPU", "[1, 1e6]")
    cpu_capability: str = setting("", "vector instructions that PyTorch uses on this CPU")
    world_size: int = setting(1, "number of processes", "[1, 1e6]")


@dataclass(frozen=True)
class Runtime:
    """The device, the dtype of matrix products, and the processes of the run.

    Weights, optimizer state and loss are always float32. `reason` explains the choice of the dtype.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str
    world: World = SINGLE_PROCESS

    def __str__(self) -> str:
        world = self.world
        processes = f", {world.size} processes on {world.n_nodes} machine(s)" * world.launched
        return f"{self.device.type}, {dtype_name(self.dtype)} ({self.reason}){processes}"

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context for forward passes: autocast to `dtype`, nothing for float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @cached_property
    def peak_flops(self) -> float:
        """The measured FLOP/s of a square matrix product: the reference for utilization."""
        size = 8192 if self.device.type == "cuda" else 512
        matrix = torch.ones(size, size, dtype=self.dtype, device=self.device)
        seconds = []
        for _ in range(20):  # the first ones warm up
            began = time.perf_counter()
            (matrix @ matrix)[0, 0].item()  # waits for the result
            seconds.append(time.perf_counter() - began)
        return 2 * size**3 / min(seconds)

    def environment(self) -> Environment:
        """Return what must be the same for a bit-exact resume."""
        cuda = self.device.type == "cuda"
        return Environment(
            torch=str(torch.__version__),
            python=platform.python_version(),
            device=self.device.type,
            device_name=torch.cuda.get_device_name() if cuda else _cpu_info("model name"),
            dtype=dtype_name(self.dtype),
            threads=torch.get_num_threads(),
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            world_size=self.world.size,
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def select_runtime(device: str, dtype: str, world: World = SINGLE_PROCESS) -> Runtime:
    """Select the device and dtype that the settings name, and for `auto` the best available.

    Raises ResourceError if this machine does not have them.
    """
    # torch.distributed does not support MPS
    mps = torch.backends.mps.is_available() and not world.launched
    available = {"cuda": torch.cuda.is_available(), "mps": mps, "cpu": True}
    name = next(each for each in available if available[each]) if device == "auto" else device
    if not available[name]:
        fits = ", ".join(each for each in ("cpu", "cuda", "mps") if available[each])
        raise ResourceError(
            f"device: no {name.upper()} device on this machine; available: {fits}; use device: auto"
        )
    if name == "cuda" and world.launched and world.local_size > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise ResourceError(
            f"device: {world.local_size} processes on this machine are more than its {gpus} GPUs; "
            f"allowed: one process per GPU; use torchrun --nproc_per_node={gpus}, or device: cpu"
        )
    if dtype == "auto":
        dtype, reason = _fast_dtype(name)
    else:
        reason = "as set"
    if dtype == "float16" and name == "cpu":
        raise ResourceError(
            "dtype: float16 is not supported on a CPU; allowed: float32, bfloat16; use dtype: auto"
        )
    if name == "cuda" and world.launched:
        torch.cuda.set_device(world.local_rank)
    return Runtime(torch.device(name), DTYPES[dtype], reason, world)


def resolve_kernel(model: ModelConfig, runtime: Runtime) -> ModelConfig:
    """Replace `kernel: auto` with the fastest kernel to train with.

    In bfloat16 on a CPU the backward pass of sdpa is slow (docs/results.md).
    """
    if model.kernel != "auto":
        return model
    bfloat16_on_cpu = runtime.device.type == "cpu" and runtime.dtype == torch.bfloat16
    batched = bfloat16_on_cpu and model.block_size <= MAX_BATCHED_CONTEXT
    return dataclasses.replace(model, kernel="batched" if batched else "sdpa")


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next step, which needs the same amount.

    By default glibc returns large blocks to the system. Getting them back costs a page fault per
    page, because the system zeroes each one when it is first used (mallopt(3)). This function does
    nothing with other C libraries.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)


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
    float32 ones (docs/results.md). Arm CPUs have not been measured.
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
    return has_avx512_bf16 and "Intel" not in _cpu_info("vendor_id")


def _cpu_info(key: str) -> str:
    """Return the entry `key` of /proc/cpuinfo, or else platform.processor().

    On Windows, platform.processor() contains the vendor. The "model name" identifies the CPU in
    checkpoints, because libraries choose their kernels by it.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def compile_or_fall_back(
    model: torch.nn.Module, notify: Callable[[str], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile the model. If a call fails to compile, notify and use the model uncompiled."""
    forward = torch.compile(model)

    def call(ids: torch.Tensor) -> torch.Tensor:
        nonlocal forward
        try:
            return forward(ids)
        except Exception as error:  # the compiler's errors have no common base class
            if forward is model or isinstance(error, torch.OutOfMemoryError):
                raise
            forward = model
            notify(f"torch.compile failed ({type(error).__name__}); continuing without it")
            return model(ids)

    return call


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return a seed for torch's default generator: dropout then needs no saved state."""
    sequence = np.random.SeedSequence((seed, step, rank))
    return int(sequence.generate_state(1, np.uint64)[0])
