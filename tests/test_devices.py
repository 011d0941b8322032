"""No tensor of a forward pass is left on the CPU, shown without a GPU."""

import re
import subprocess
import sys

from tests.conftest import ROOT


def test_all_pairs_compute_on_a_simulated_gpu():
    command = [sys.executable, "-m", "tests.simulated_gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"96 models and 24 layers on a simulated device, \w+: .*\n", done.stdout)
