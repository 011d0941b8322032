"""Forward passes on a simulated GPU (see tests/simulated_gpu.py)."""

import re
import subprocess
import sys

from tests.conftest import ROOT


def test_no_layout_or_kernel_leaves_a_tensor_on_the_cpu():
    command = [sys.executable, "-m", "tests.simulated_gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"96 models and 24 layers on a simulated device, \w+: .*\n", done.stdout)
