"""Fine-tuning with new characters against a fresh start: python -m benchmarks.finetune [TEXT]

A run of configs/shakespeare.yaml is trained further on TEXT, or on the plays of this repository
with typographic apostrophes, dashes and ellipses, which are new characters for it. The same config
is trained on the same text from the start, for as many steps, so for as long. Losses are exact,
over the whole validation text. Fine-tunes multiply the config's learning rates by each of RATES.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.runs import train
from benchmarks.time_to_loss import TrainingResult, run_training
from checkpointing import checkpoint
from configs.command import parse_train

CONFIG = "configs/shakespeare.yaml"
RATES = (1.0, 0.3, 0.1)
TYPOGRAPHY = {"'": "\u2019", "--": "\u2014", "...": "\u2026"}


def write_text(folder: Path) -> None:
    """Write the plays with typographic characters, which Tiny Shakespeare does not have."""
    folder.mkdir()
    for play in sorted(Path("data/plays").glob("*.txt")):
        text = play.read_text(encoding="utf-8")
        for plain, typographic in TYPOGRAPHY.items():
            text = text.replace(plain, typographic)
        (folder / play.name).write_text(text, encoding="utf-8")


def finetune_options(parent: Path, rate: float) -> list[str]:
    """Return the options of a fine-tune with `rate` times the config's learning rates."""
    train = parse_train([CONFIG]).new_settings().train
    return [
        f"--init_from={parent}",
        "--new_characters=add",
        f"--learning_rate={rate * train.learning_rate}",
        f"--muon_learning_rate={rate * train.muon_learning_rate}",
    ]


def print_means(results: dict[tuple[int, str], list[TrainingResult]]) -> None:
    """Print the mean time and loss of each start, and its distance to a fresh start."""
    print(f"\n{'steps':>5}  {'start':<24}{'training':>10}{'loss':>9}{'below fresh':>13}")
    for (steps, name), runs in results.items():
        seconds, loss = (
            statistics.mean(getattr(run, value) for run in runs)
            for value in ("step_seconds", "loss")
        )
        fresh = statistics.mean(run.loss for run in results[steps, "fresh"])
        print(f"{steps:>5}  {name:<24}{seconds:>8.1f} s{loss:>9.4f}{fresh - loss:>13.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("text", type=Path, nargs="?", metavar="TEXT", help="none: the plays")
    parser.add_argument("--steps", type=int, nargs="+", default=[40, 160, 640])
    parser.add_argument("--parent", type=Path, help="run to start from; none: train one first")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        text, parent = options.text or Path(name) / "plays", options.parent or Path(name) / "parent"
        if not options.text:
            write_text(text)
        if not options.parent:
            train(parent, CONFIG)
        saved = checkpoint.load(parent / checkpoint.BEST)
        loss, step = saved.progress.best_loss, saved.progress.step
        print(f"parent: {step:,} steps on {saved.data.name}, loss {loss:.4f} there", flush=True)
        starts = {"fresh": []}
        starts |= {f"fine-tuned, rate x {rate:g}": finetune_options(parent, rate) for rate in RATES}
        results = {(steps, start): [] for steps in options.steps for start in starts}
        for seed in range(options.repeats):
            for steps, start in results:
                words = [f"--max_iters={steps}", f"--eval_interval={steps}", "--log=scalars"]
                words += [*starts[start], f"--seed={seed}"]
                result = run_training(CONFIG, f"--data.sources={text}", *words)
                results[steps, start].append(result)
                print(
                    f"{steps:>5}  {start:<24}{result.step_seconds:>8.1f} s{result.loss:>9.4f}",
                    flush=True,
                )
        print_means(results)


if __name__ == "__main__":
    main()
