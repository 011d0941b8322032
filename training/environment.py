"""The environment of a training run: what a checkpoint records of it, and what a run sets there."""

import contextlib
import ctypes
import dataclasses
import platform
from collections.abc import Callable

import numpy as np
import torch

from configs.fields import Checked, setting
from model.runtime import Runtime, cpu_info, dtype_name


@dataclasses.dataclass(frozen=True)
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


def environment_of(runtime: Runtime, world_size: int) -> Environment:
    """Return what must be the same for a bit-exact resume."""
    cuda = runtime.device.type == "cuda"
    return Environment(
        torch=str(torch.__version__),
        python=platform.python_version(),
        device=runtime.device.type,
        device_name=torch.cuda.get_device_name() if cuda else cpu_info("model name"),
        dtype=dtype_name(runtime.dtype),
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        world_size=world_size,
    )


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next step, which needs the same amount.

    By default glibc returns large blocks to the system. Getting them back costs a page fault per
    page, because the system zeroes each one when it is first used (mallopt(3)). This function does
    nothing with other C libraries.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        # glibc up to 2.34 refuses thresholds above 32 MiB, and would then keep 128 KiB
        libc.mallopt(mmap_threshold, 2**30) or libc.mallopt(mmap_threshold, 2**25)
        libc.mallopt(trim_threshold, 2**31 - 1)


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
