"""Losses of n-grams and of checkpoints on one text: python -m benchmarks.baselines RUN ...

Prints a table in nats per character of the same validation text: n-grams with modified Kneser-Ney
smoothing, which read the text without windows, and each checkpoint. All are trained on the training
text alone; a checkpoint with another training text is refused.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.ngrams import NgramModel
from configs.schema import DataConfig
from data.batches import evaluation_windows
from data.corpus import Corpus, load_corpus
from model.gpt import GPT
from storage.checkpoint import build_model, load_preferred
from training.device import select_runtime
from training.evaluate import batch_size_for, exact_loss

TEXT = Path(__file__).parent.parent / "data" / "tinyshakespeare" / "input.txt"
LONGEST_NGRAM = 8
CHUNK = 10_000  # characters that an n-gram model predicts at a time


def load_gpt(folder: str, corpus: Corpus) -> GPT:
    """Load the best GPT of a run, or a checkpoint; exit if it was trained on another text."""
    saved = load_preferred(Path(folder), "best", notify=print)
    settings = replace(saved.settings.data, sources=DataConfig().sources, fallback="")
    same_text = saved.text.sha256 == corpus.sha256 and settings == DataConfig()
    if not same_text or saved.vocabulary != corpus.tokenizer.vocabulary:
        raise SystemExit(f"error: {folder} was not trained on the first nine tenths of the text")
    return build_model(saved).eval()


def ngram_loss(model: NgramModel, ids: np.ndarray) -> float:
    """Return the loss of an n-gram model, in nats per character."""
    nats = 0.0
    for start in range(0, len(ids) - 1, CHUNK):
        y = ids[start + 1 : start + CHUNK + 1]
        x = ids[max(0, start + 1 - model.order) : start + len(y)]
        probs = model.probs(x[None], len(y))[0]
        nats -= np.log(probs[np.arange(len(y)), y], dtype=np.float64).sum()
    return nats / (len(ids) - 1)


def print_row(name: str, loss: float) -> None:
    print(f"| {name} | {loss:.4f} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("ckpt", nargs="*", help="run folders or checkpoints, one row each")
    parser.add_argument(
        "--text", type=Path, default=TEXT, help="a file; its last tenth is predicted"
    )
    options = parser.parse_args(argv)
    if not options.text.is_file():
        parser.error(f"--text: {options.text} is not a file")
    corpus = load_corpus(DataConfig(sources=[str(options.text)]))
    vocabulary = corpus.tokenizer.vocabulary
    train, val = corpus.train.ids, corpus.val.ids
    models = {name: load_gpt(name, corpus) for name in options.ckpt}
    print("| model | loss |\n| --- | ---: |")
    for order in range(1, LONGEST_NGRAM + 1):
        model = NgramModel(train, order, len(vocabulary))
        if model.order == order:  # it is lower for a large vocabulary
            print_row(f"modified Kneser-Ney, order {order}", ngram_loss(model, val))
    for name, model in models.items():
        T = model.config.block_size
        windows = evaluation_windows(corpus.val, T, batch_size_for(T, len(vocabulary)))
        print_row(name, exact_loss(model, windows, select_runtime("cpu", "float32")))


if __name__ == "__main__":
    main()
