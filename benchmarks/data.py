"""Time and memory to prepare a text of 1 GB: python -m benchmarks.data [--megabytes 1000]

Two texts are generated in a temporary folder, one in ASCII and one in mixed UTF-8. Each is encoded
by itself, and then by `train.py`, which takes one step of the smallest model, twice: the first
start counts and encodes the characters, the second finds the encoded text in the disk cache.

Peak memory is the largest anonymous resident memory of the process (RssAnon), which leaves out
memory-mapped files; it is sampled every 5 ms. The cost of `import torch` is subtracted from all
seconds and MB. Linux only.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXTS = {  # name: characters to draw from
    "ASCII": "abcdefghijklmnopqrstuvwxyz ETAOIN,.\n",
    "mixed UTF-8": (
        "the quick brown fox\n Съешь ещё этих булок Straße naïve "
        "天地玄黄宇宙洪荒 いろはにほへと 🙂🎭"
    ),
}
ENCODE = """
import sys, time, torch
from configs.schema import DataConfig
from data.corpus import load_corpus
began = time.perf_counter()
load_corpus(DataConfig(sources=[sys.argv[1]]))
print(f"seconds {time.perf_counter() - began}")
"""
ONE_STEP = ["--max_iters=1", "--warmup_iters=0", "--val_fraction=1e-5", "--sample_chars=1"]


def write_text(path: Path, characters: str, size: int) -> None:
    """Write about `size` bytes of random lines: 10,000 different ones, shuffled repeatedly."""
    rng = random.Random(0)
    lines = ["".join(rng.choices(characters, k=99)) + "\n" for _ in range(10_000)]
    with open(path, "w", encoding="utf-8", newline="") as file:
        while file.tell() < size:
            rng.shuffle(lines)
            file.write("".join(lines))


def run_python(*arguments: str, **environment: str) -> tuple[float, float, str]:
    """Run a Python process; return its seconds, its peak memory in MB, and its output."""
    began, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, env=os.environ | environment)
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            anonymous = re.search(r"RssAnon:\s+(\d+)", status)  # no such line in a zombie's status
            if anonymous:
                peak = max(peak, int(anonymous[1]))
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        output.seek(0)
        assert process.returncode == 0
        return seconds, peak / 1e3, output.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    size = parser.parse_args().megabytes * 10**6
    torch_seconds, torch_memory, _ = run_python("-c", "import torch")
    print(
        f"import torch: {torch_seconds:.1f} s, {torch_memory:.0f} MB; subtracted from the seconds "
        "and MB below\n"
    )
    print("| text | encoded | peak | first start of train.py | peak | second start | peak |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, characters in TEXTS.items():
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, "text.txt")
            write_text(text, characters, size)
            separate_cache = f"{folder}/alone"
            _, memory, output = run_python("-c", ENCODE, str(text), XDG_CACHE_HOME=separate_cache)
            speed = text.stat().st_size / 1e6 / float(re.search("seconds (.*)", output)[1])
            row = [f"{speed:.0f} MB/s", f"{memory - torch_memory:.0f} MB"]
            options = [f"--data.sources={text}", f"--out_dir={folder}/out", "--overwrite"]
            command = ["train.py", "configs/smoke.yaml", *ONE_STEP, *options]
            for _ in range(2):
                seconds, memory, _ = run_python(*command, XDG_CACHE_HOME=folder)
                row += [f"{seconds - torch_seconds:.1f} s", f"{memory - torch_memory:.0f} MB"]
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
