"""The memory of a step."""

import platform

import pytest

from tests.conftest import run_command

SCRIPT = """
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_reused():
    faults = int(run_command("-c", SCRIPT).stdout)
    assert faults < 36_864 / 4, "page faults; 36,864 if no memory is reused"
