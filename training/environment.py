"""The environment of a training run: what a checkpoint records of it, and what a run sets there."""

import contextlib
import ctypes
import platform
from collections.abc import Iterator

import numpy as np
import torch

from common.errors import ResourceError, is_out_of_memory
from model.runtime import Runtime, cpu_info, dtype_name


def environment_of(runtime: Runtime, world_size: int) -> dict[str, str]:
    """Return what must be the same for a bit-exact resume, besides settings and text."""
    cuda = runtime.device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": runtime.device.type,
        "device_name": torch.cuda.get_device_name() if cuda else cpu_info("model name"),
        "dtype": dtype_name(runtime.dtype),
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "world_size": str(world_size),
    }


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


@contextlib.contextmanager
def compile_errors() -> Iterator[None]:
    """Turn an error of torch.compile, in a forward or a backward pass, into a ResourceError."""
    try:
        yield
    except Exception as error:  # the compiler's errors have no common base class
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise ResourceError(
            f"compile: torch.compile failed ({reason}); --compile=false trains without it"
        ) from error


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return a seed for torch's default generator: dropout then needs no saved state."""
    sequence = np.random.SeedSequence((seed, step, rank))
    return int(sequence.generate_state(1, np.uint64)[0])
