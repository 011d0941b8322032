"""How soon is a text of 1 GB ready, and in how much memory? python -m benchmarks.data [--megabytes
1000]

Two texts are made in a temporary folder, one ASCII, one mixed UTF-8. Each is encoded, and
`train.py` takes one step of the smallest model on it, twice: the first start counts and encodes,
the second finds that done. Memory is what a process has of its own (mapped file pages are the
system's), looked at every 5 ms, beyond that of a bare `import torch`. For Linux.
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
TEXTS = {
    "ASCII": "abcdefghijklmnopqrstuvwxyz ETAOIN,.\n",
    "mixed UTF-8": (
        "the quick brown fox\n Съешь ещё этих булок Straße naïve "
        "天地玄黄宇宙洪荒 いろはにほへと 🙂🎭"
    ),
}
ENCODE = """
import sys, time, torch
from data.corpus import load_corpus
began = time.perf_counter()
load_corpus([sys.argv[1]], notify=print)
print(f"seconds {time.perf_counter() - began}")
"""
STEP = ["--max_iters=1", "--warmup_iters=0", "--val_fraction=1e-5", "--sample_chars=1"]


def generate(path: Path, characters: str, size: int) -> None:
    """About `size` bytes: random lines of `characters`, a megabyte of them shuffled again and
    again.
    """
    rng = random.Random(0)
    lines = ["".join(rng.choices(characters, k=99)) + "\n" for _ in range(10_000)]
    with open(path, "w", encoding="utf-8", newline="") as file:
        while file.tell() < size:
            rng.shuffle(lines)
            file.write("".join(lines))


def measure(*arguments: str, **environment: str) -> tuple[float, float, str]:
    """Seconds of a process of Python, the most megabytes it had of its own, and what it printed."""
    began, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as printed:
        words = [sys.executable, *arguments]
        process = subprocess.Popen(words, cwd=ROOT, stdout=printed, env=os.environ | environment)
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, *map(int, re.findall(r"RssAnon:\s+(\d+)", status)), 0)
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        printed.seek(0)
        assert process.returncode == 0
        return seconds, peak / 1e3, printed.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    size = parser.parse_args().megabytes * 10**6
    torch_seconds, torch_memory, _ = measure("-c", "import torch")
    print(
        f"import torch: {torch_seconds:.1f} s, {torch_memory:.0f} MB; below, what comes on top of "
        f"that\n"
    )
    print("| text | encoded | peak | first start of train.py | peak | second start | peak |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, characters in TEXTS.items():
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, "text.txt")
            generate(text, characters, size)
            _, memory, printed = measure("-c", ENCODE, str(text), XDG_CACHE_HOME=f"{folder}/alone")
            speed = text.stat().st_size / 1e6 / float(re.search("seconds (.*)", printed)[1])
            row = [f"{speed:.0f} MB/s", f"{memory - torch_memory:.0f} MB"]
            for _ in range(2):
                options = [
                    *STEP,
                    f"--data.sources={text}",
                    f"--out_dir={folder}/out",
                    "--overwrite",
                ]
                seconds, memory, _ = measure(
                    "train.py", "configs/smoke.yaml", *options, XDG_CACHE_HOME=folder
                )
                row += [f"{seconds - torch_seconds:.1f} s", f"{memory - torch_memory:.0f} MB"]
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
