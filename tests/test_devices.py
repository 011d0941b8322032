"""Forward passes on a simulated GPU (see tests/simulated_gpu.py)."""

import re


def test_no_layout_or_kernel_leaves_a_tensor_on_the_cpu(run):
    done = run("-m", "tests.simulated_gpu")
    assert re.fullmatch(r"48 models and layers on a simulated device, \w+: .*\n", done.stdout)
