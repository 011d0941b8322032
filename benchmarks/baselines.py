"""Baselines: losses of several kinds of models on one text: python -m benchmarks.baselines RUN...

Prints one table per evaluation protocol, in nats per character of the same validation text:

- fixed models: n-grams with modified Kneser-Ney smoothing, which read the text without windows,
  and each checkpoint
- the checkpoints with overlapping windows: after the first window, every prediction has at
  least half a window of context
- adaptive models, which learn from the validation text after predicting it: PPMd, zpaq, and each
  checkpoint by dynamic evaluation

Losses of different protocols are not comparable. PPMd needs the package pyppmd, zpaq the program
zpaq; tools that are not installed are skipped with a note. All models are trained on the training
text alone; a checkpoint with another training text is refused.
"""

import argparse
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.ngrams import NgramModel
from configs.schema import DataConfig
from data.batches import Split, evaluation_windows
from data.corpus import Corpus, load_corpus
from model.gpt import GPT
from run import checkpoint
from training import device
from training.evaluate import batch_size_for, cross_entropy, exact_loss, window_losses

TEXT = Path(__file__).parent.parent / "data" / "tinyshakespeare" / "input.txt"
LONGEST_NGRAM = 8
CHUNK = 10_000  # characters that an n-gram model predicts at a time
LEARNING_RATE = 0.1  # of dynamic evaluation: plain SGD
PPMD_ORDERS = (4, 5, 6, 8)
ZPAQ_METHOD = "5"  # the strongest: context mixing


def load_model(folder: str, corpus: Corpus) -> GPT:
    """Load the best GPT of a run, or a checkpoint; exit if it was trained on another text."""
    saved, _ = checkpoint.find(Path(folder), "best")
    settings = replace(saved.config.data, sources=DataConfig().sources)
    if saved.data.sha256 != corpus.sha256 or settings != DataConfig():
        raise SystemExit(f"error: {folder} was not trained on the first nine tenths of the text")
    return checkpoint.build_model(saved).eval()


def ngram_loss(model: NgramModel, ids: np.ndarray) -> float:
    """Return the loss of an n-gram model, in nats per character."""
    nats = 0.0
    for start in range(0, len(ids) - 1, CHUNK):
        y = ids[start + 1 : start + CHUNK + 1]
        x = ids[max(0, start + 1 - model.order) : start + len(y)]
        probs = model.probs(x[None], len(y))[0]
        nats -= np.log(probs[np.arange(len(y)), y], dtype=np.float64).sum()
    return nats / (len(ids) - 1)


def overlapping_loss(model: GPT, ids: np.ndarray) -> float:
    """Return the loss with windows that overlap by half, in nats per character.

    Except in the first window, only the second half of each is counted: there, a prediction has at
    least block_size / 2 characters of context.
    """
    float32, T = device.select_runtime("cpu", "float32"), model.config.block_size
    half = max(1, T // 2)
    windows = evaluation_windows(Split(ids, ((0, min(T + 1, len(ids))),)), T, 1)
    first = window_losses(model, windows, float32)
    nats, count = first.nats.sum(), first.counts.sum()
    starts = range(half, len(ids) - 1 - (T - half), half)
    segments = Split(ids, tuple((start, min(start + T + 1, len(ids))) for start in starts))
    if starts:
        windows = evaluation_windows(segments, T, batch_size_for(T, model.vocab_size))
        others = window_losses(model, windows, float32)
        nats += others.nats[T - half :].sum()
        count += others.counts[T - half :].sum()
    assert count == len(ids) - 1, "each prediction is counted once"
    return float(nats / count)


def dynamic_loss(model: GPT, ids: np.ndarray, learning_rate: float) -> float:
    """Return the loss of a model that takes a step of SGD on each window after its prediction.

    Krause et al. 2018, "Dynamic Evaluation of Neural Sequence Models", without its decay. Dropout
    is off. The weights of `model` change.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    nats = 0.0
    for x, y in evaluation_windows(Split(ids, ((0, len(ids)),)), model.config.block_size, 1):
        y = torch.from_numpy(y)
        loss = cross_entropy(model(torch.from_numpy(x)), y)
        nats += loss.item() * y.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return nats / (len(ids) - 1)


def compressed_loss(size: Callable[[bytes], int], train: bytes, val: bytes) -> float:
    """Return what `val` adds to the compressed size of `train`, in nats per character."""
    added = size(train + val) - size(train)  # bytes
    return 8 * math.log(2) * added / len(val.decode())


def zpaq_size(text: bytes) -> int:
    """Return the size of a text in a zpaq archive, in bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").write_bytes(text)
        command = ["zpaq", "add", "text.zpaq", "text", f"-m{ZPAQ_METHOD}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return (folder / "text.zpaq").stat().st_size


def compressors() -> Iterator[tuple[str, Callable[[bytes], int]]]:
    """Yield the compressors that are installed: a name, and a function from a text to its size."""
    try:
        import pyppmd
    except ImportError:
        print("PPMd: not installed (pip install pyppmd)")
    else:
        for order in PPMD_ORDERS:
            yield (
                f"PPMd, order {order}",
                lambda text, order=order: len(
                    pyppmd.compress(text, max_order=order, mem_size=1 << 28)
                ),
            )
    if shutil.which("zpaq"):
        yield f"zpaq -m{ZPAQ_METHOD}", zpaq_size
    else:
        print("zpaq: not installed")


def print_table(title: str, rows: Iterator[tuple[str, float]]) -> None:
    print(f"\n| {title} | loss |\n| --- | ---: |")
    for name, loss in rows:
        print(f"| {name} | {loss:.4f} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("ckpt", nargs="*", help="run folders or checkpoints, one row each")
    parser.add_argument(
        "--text", type=Path, default=TEXT, help="a file; its last tenth is predicted"
    )
    options = parser.parse_args(arguments)
    if not options.text.is_file():
        parser.error(f"--text: {options.text} is not a file")
    corpus = load_corpus(DataConfig(sources=[str(options.text)]))
    vocabulary = corpus.tokenizer.vocabulary
    train, val = corpus.train.ids, corpus.val.ids
    models = {name: load_model(name, corpus) for name in options.ckpt}
    float32 = device.select_runtime("cpu", "float32")

    def fixed() -> Iterator[tuple[str, float]]:
        for order in range(1, LONGEST_NGRAM + 1):
            model = NgramModel(train, order, len(vocabulary))
            if model.order == order:  # it is lower for a large vocabulary
                yield f"modified Kneser-Ney, order {order}", ngram_loss(model, val)
        for name, model in models.items():
            T = model.config.block_size
            windows = evaluation_windows(corpus.val, T, batch_size_for(T, len(vocabulary)))
            yield name, exact_loss(model, windows, float32)

    def adaptive() -> Iterator[tuple[str, float]]:
        texts = [corpus.tokenizer.decode(ids).encode() for ids in (train, val)]
        for name, size in compressors():
            yield name, compressed_loss(size, *texts)
        for name in options.ckpt:
            model = load_model(name, corpus)  # its weights change
            yield f"{name}, dynamic evaluation", dynamic_loss(model, val, LEARNING_RATE)

    print_table("fixed models", fixed())
    if models:
        print_table(
            "overlapping windows",
            ((name, overlapping_loss(model, val)) for name, model in models.items()),
        )
    print_table("adaptive models", adaptive())


if __name__ == "__main__":
    main()
