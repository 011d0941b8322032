"""A summary of a text for the user, and advice on the size of the model."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from common.errors import first_few
from data.batches import Split
from data.text import Text
from data.tokenizer import SLICE, UNK, describe

# config file, largest text in characters, (fewest, most) parameters that suit such a text
PRESETS = (
    ("configs/mytext_small.yaml", 1e5, (0, 1.2e6)),
    ("configs/mytext.yaml", 2e7, (3e5, 1.2e7)),
    ("configs/mytext_gpu.yaml", float("inf"), (2e6, float("inf"))),
)


def summarize(
    texts: Sequence[Text],
    text_counts: Sequence[Counter[str]],
    vocabulary: str,
    train: Split,
    val: Split,
) -> list[str]:
    """Return the summary of a text, and of its validation text; notes about it come last.

    `text_counts` are the counts of the characters of each.
    """
    counts = sum(text_counts, Counter())
    share = len(val) / (len(train) + len(val))
    # the rarest characters show what does not belong into a text
    rarest = sorted(counts, key=lambda c: (counts[c], c))[:3]
    return [
        *map(_describe, ("text        ", "validation  "), texts, text_counts),
        f"split       {len(train):,} characters to train on, "
        f"{len(val):,} ({share:.1%}) to validate on",
        f"rarest      {', '.join(f'{describe(c)} {_times(counts[c])}' for c in rarest)}",
        *(f"note: {note}" for note in chain.from_iterable(text.notes for text in texts)),
        *(f"note: {note}" for note in _notes(counts, vocabulary, train, val)),
    ]


def size_advice(parameters: int, characters: int) -> str | None:
    """Return a note that names a better config if the model is too large or small for the text."""
    preset, _, (low, high) = next(row for row in PRESETS if characters <= row[1])
    if low <= parameters <= high:
        return None
    if parameters > high:
        size, result = "many", "memorizes the text"
    else:
        size, result = "few", "learns less than it could"
    return (
        f"note: {parameters:,} parameters are too {size} for {characters:,} characters: such a "
        f"model {result}; use {preset}"
    )


def _describe(label: str, text: Text, counts: Counter[str]) -> str:
    """Return the line about a text: where it is, and its size."""
    files = f"{len(text.files):,} files, " if len(text.files) > 1 else ""
    return f"{label}{text.path}: {files}{counts.total():,} characters, {len(counts):,} distinct"


def _notes(
    counts: Counter[str],
    vocabulary: str,
    train: Split,
    val: Split,
) -> Iterator[str]:
    """Yield what is unusual about a text, but not an error."""
    if controls := [c for c in counts if unicodedata.category(c) == "Cc" and c not in "\t\n"]:
        names = first_few(f"U+{ord(c):04X} {_times(counts[c])}" for c in sorted(controls))
        yield f"control characters are kept: {names}"
    if rare := sorted(counts.keys() - set(vocabulary)):
        times = _times(sum(counts[c] for c in rare))
        yield (
            f"{len(rare):,} rare characters, {times} in all, are mapped to {describe(UNK)}: "
            f"{first_few(map(describe, rare))}"
        )
    if unseen := _only_in(val, counts, vocabulary):
        times = _times(sum(unseen.values()))
        yield (
            f"{len(unseen):,} characters of the validation text, {times} in all, are not in the "
            f"training text: {first_few(map(describe, unseen))}"
        )


def _only_in(split: Split, counts: Counter[str], vocabulary: str) -> dict[str, int]:
    """Return the characters that occur only in this split, with their counts."""
    mapped = sum(counts.values()) - sum(counts[c] for c in vocabulary if c != UNK)
    everywhere = counts | {UNK: mapped}
    here = zip(vocabulary, _count(split, len(vocabulary)).tolist(), strict=True)
    return {c: count for c, count in here if 0 < count == everywhere[c]}


def _count(split: Split, vocab_size: int) -> np.ndarray:
    """Count each id in a split, with bounded memory: (vocab_size,)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    counted = 0  # the segments of a list overlap by a character
    for start, end in split.segments:
        for first in range(max(start, counted), end, SLICE):
            piece = split.ids[first : min(first + SLICE, end)]
            counts += np.bincount(piece, minlength=vocab_size)
        counted = end
    return counts


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
