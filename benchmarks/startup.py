"""Start-up time of the commands: python -m benchmarks.startup

A wrong setting or argument is reported before torch is imported, so it should cost little more than
starting Python. Each time is the median of 5 runs.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = 5
COMMANDS = {  # name: arguments of python
    "python -c pass": ["-c", "pass"],
    "train.py, a wrong setting": ["train.py", "configs/shakespeare.yaml", "--n_head=5"],
    "train.py --help": ["train.py", "--help"],
    "sample.py, a wrong argument": ["sample.py", "--ckpt=out/shakespeare", "--temp=1"],
    "sample.py --help": ["sample.py", "--help"],
    "import torch": ["-c", "import torch"],
}


def time_python(arguments: list[str]) -> float:
    """Return the wall-clock seconds of one Python process, from start to exit."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=False)
    return time.perf_counter() - began


def main() -> None:
    title = f"median of {RUNS} runs"
    print(f"{title:<30}{'seconds':>8}{'times python':>14}")
    bare_python = None
    for name, arguments in COMMANDS.items():
        median = statistics.median(time_python(arguments) for _ in range(RUNS))
        bare_python = bare_python or median
        print(f"{name:<30}{median:>8.3f}{median / bare_python:>14.1f}")


if __name__ == "__main__":
    main()
