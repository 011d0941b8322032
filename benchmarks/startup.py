"""How soon is a mistake answered? Median seconds of 5 runs each: python -m benchmarks.startup

A wrong setting or argument must not wait for torch, so it should cost little more than Python
itself.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = 5
COMMANDS = {  # what is asked: the arguments of python
    "python -c pass": ["-c", "pass"],
    "train.py, a wrong setting": ["train.py", "configs/shakespeare.yaml", "--n_head=5"],
    "train.py --help": ["train.py", "--help"],
    "sample.py, a wrong argument": ["sample.py", "--ckpt=out/shakespeare", "--temp=1"],
    "sample.py --help": ["sample.py", "--help"],
    "import torch": ["-c", "import torch"],
}


def seconds(arguments: list[str]) -> float:
    """Wall-clock seconds of one process, from its start to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=False)
    return time.perf_counter() - began


def main() -> None:
    print(f"{'median of ' + str(RUNS) + ' runs':<30}{'seconds':>8}{'times python':>14}")
    bare = None
    for name, arguments in COMMANDS.items():
        median = statistics.median(seconds(arguments) for _ in range(RUNS))
        bare = bare or median
        print(f"{name:<30}{median:>8.3f}{median / bare:>14.1f}")


if __name__ == "__main__":
    main()
