"""Lists and answers beside published results: python -m benchmarks.lists NAMES

NAMES is makemore's names.txt. Trains, with each seed,

- configs/names.yaml on makemore's split: 1,000 random test names, of which 153 are training names
  too; and on the split of this project, in which no name is on both sides
- configs/addition.yaml on sums of two and of three digits: of all 10,000 pairs of the former, 9,000
  to train on and 1,000 to validate on; of the latter 10,000 random ones and 1,000 others

Prints a table with the best loss, in nats per character, or the exact match at the end; ours beside
the published one.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.runs import read_metrics, train

NAMES, ADDITION = "configs/names.yaml", "configs/addition.yaml"
MAKEMORE_SEED, TEST_ITEMS = 3407, 1000
NAMES_ELSEWHERE = "about 1.92 (makemore's README)"
SUMS = {  # base, reversed -> published; 3 digits: Lee et al. 2023, arXiv 2307.03381, table of sizes
    (100, False): "-",
    (100, True): "-",
    (1000, False): "88.2 % (10.6 M parameters)",
    (1000, True): "99.79 % (10.6 M parameters)",
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


def run_recipe(config: str, *options: str) -> tuple[list[dict[str, str]], float]:
    """Run train.py; return the rows of its evaluations and the minutes of the whole command."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name, "run"), time.monotonic()
        train(folder, config, *options)
        minutes = (time.monotonic() - began) / 60
        return [row for row in read_metrics(folder) if row["val_loss"]], minutes


def run_on(split: tuple[list[str], list[str]], config: str, *options: str):
    """Run train.py on training and validation items; return what `run_recipe` returns."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("train.txt", "val.txt")]
        for path, items in zip(paths, split, strict=True):
            path.write_text("\n".join(items) + "\n")
        sources = (f"--sources={paths[0]}", f"--val_sources={paths[1]}")
        return run_recipe(config, *sources, *options)


def print_row(
    task: str, values: Sequence[float], form: str, minutes: float, published: str
) -> None:
    spread = f"{min(values):{form}} to {max(values):{form}}"
    mean = statistics.mean(values)
    print(f"| {task} | {mean:{form}} | {spread} | {minutes:.1f} | {published} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", type=Path, help="makemore's names.txt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args(argv)
    if not options.names.is_file():
        parser.error(f"{options.names} is not a file; makemore has it: names.txt")
    names = options.names.read_text().split()
    print("| task | ours | lowest to highest | minutes | published |")
    print("| --- | ---: | ---: | ---: | --- |")

    def row(task: str, column: str, published: str, run, *words: str) -> None:
        runs = [run(*words, f"--seed={seed}") for seed in options.seeds]
        values = [[float(row[column]) for row in rows] for rows, _ in runs]
        minutes = statistics.mean(minutes for _, minutes in runs)
        if column == "val_loss":
            print_row(task, list(map(min, values)), ".4f", minutes, published)
        else:
            print_row(task, [value[-1] for value in values], ".2%", minutes, published)

    split = makemore_split(names)
    row(
        "names, makemore's split",
        "val_loss",
        NAMES_ELSEWHERE,
        lambda *words: run_on(split, NAMES, *words),
    )
    all_names = f"--sources={options.names.absolute()}"
    row(
        "names, none on both sides", "val_loss", "-",
        lambda *words: run_recipe(NAMES, all_names, *words),
    )  # fmt: skip
    for (base, is_reversed), published in SUMS.items():
        digits, order = len(str(base - 1)), "reversed" if is_reversed else "plain"
        pairs = sums_split(base, is_reversed)
        row(
            f"sums of {digits} digits, {order}", "exact_match", published,
            lambda *words, pairs=pairs: run_on(pairs, ADDITION, *words),
        )  # fmt: skip


if __name__ == "__main__":
    main()
