"""Lists and answers beside published results: python -m benchmarks.lists NAMES

NAMES is makemore's names.txt. Trains, with each seed,

- configs/names.yaml on makemore's split: 1,000 random test names, of which 153 are training names
  too; and on the split of this project, in which no name is on both sides
- configs/addition.yaml on sums of two and of three digits: of all 10,000 pairs of the former, 9,000
  to train on and 1,000 to validate on; of the latter 10,000 random ones and 1,000 others

Prints a table with the best loss, in nats per character, or the exact match at the end, and the
minutes of the whole command; a published result is in brackets.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.runs import read_curves, train

NAMES, ADDITION = "configs/names.yaml", "configs/addition.yaml"
MAKEMORE_SEED, TEST_ITEMS = 3407, 1000
SUMS = {  # task -> base, reversed; published: Lee et al. 2023, arXiv 2307.03381, table of sizes
    "sums of 2 digits, plain": (100, False),
    "sums of 2 digits, reversed": (100, True),
    "sums of 3 digits, plain (10.6 M parameters: 88.2 %)": (1000, False),
    "sums of 3 digits, reversed (10.6 M parameters: 99.79 %)": (1000, True),
}


def makemore_split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return makemore's training and test names."""
    torch.manual_seed(MAKEMORE_SEED)
    order = torch.randperm(len(names)).tolist()
    return [names[i] for i in order[:-TEST_ITEMS]], [names[i] for i in order[-TEST_ITEMS:]]


def sums_split(base: int, is_reversed: bool) -> tuple[list[str], list[str]]:
    """Return training and test sums of two numbers below `base`, none twice."""
    pairs = random.Random(0).sample(range(base**2), min(base**2, 11_000))
    lines = []
    for a, b in (divmod(pair, base) for pair in pairs):
        answer = str(a + b)
        lines.append(f"{a}+{b}={answer[::-1] if is_reversed else answer}")
    return lines[:-TEST_ITEMS], lines[-TEST_ITEMS:]


def train_on(sources: Sequence[Sequence[str]], config: str, seed: int) -> tuple[float, float]:
    """Train on lists of items, one or (to train on, to validate on); return result and minutes.

    The result is the exact match at the end, or for a list without questions the best loss.
    """
    with tempfile.TemporaryDirectory() as name:
        options = [f"--seed={seed}"]
        for option, items in zip(("sources", "val_sources"), sources, strict=False):
            path = Path(name, f"{option}.txt")
            path.write_text("\n".join(items) + "\n")
            options.append(f"--{option}={path}")
        folder, began = Path(name, "run"), time.monotonic()
        train(folder, config, *options)
        minutes, curves = (time.monotonic() - began) / 60, read_curves(folder)
        result = curves["val/exact_match"][-1] if config == ADDITION else min(curves["val/loss"])
        return result, minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", type=Path, help="makemore's names.txt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    names = options.names.read_text().split()
    tasks = {  # task, with the published result -> config, items
        "names, makemore's split (makemore's README: about 1.92)": (NAMES, makemore_split(names)),
        "names, none on both sides": (NAMES, [names]),
    }
    for task, (base, is_reversed) in SUMS.items():
        tasks[task] = ADDITION, sums_split(base, is_reversed)

    print("| task | ours | lowest to highest | minutes |")
    print("| --- | ---: | ---: | ---: |")
    for task, (config, items) in tasks.items():
        runs = [train_on(items, config, seed) for seed in options.seeds]
        results, minutes = zip(*runs, strict=True)
        form = ".2%" if config == ADDITION else ".4f"
        mean, low, high = statistics.mean(results), min(results), max(results)
        row = f"{task} | {mean:{form}} | {low:{form}} to {high:{form}}"
        print(f"| {row} | {statistics.mean(minutes):.1f} |", flush=True)


if __name__ == "__main__":
    main()
