"""A summary of a text for the user, and notes on what is unusual about it or about the model."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from common.errors import counted, first_few
from data.batches import Split
from data.text import Text
from data.tokenizer import SLICE, UNK, describe

# how many pieces of the validation text are looked for in the training text, and their length
PIECES, PIECE_LENGTH = 20, 200
# config file, largest text in characters, (fewest, most) parameters that suit such a text
PRESETS = (
    ("configs/mytext_small.yaml", 1e5, (0, 1.2e6)),
    ("configs/mytext.yaml", 2e7, (3e5, 1.2e7)),
    ("configs/mytext.yaml", float("inf"), (3e5, float("inf"))),
)


def summarize(
    texts: Sequence[Text],
    text_counts: Sequence[Counter[str]],
    vocabulary: str,
    train: Split,
    val: Split,
    validates: str,
) -> list[str]:
    """Return the summary of a text, and of its validation text; notes about it come last.

    `text_counts` are the counts of the characters of each; `validates` says which part of a single
    text does.
    """
    # of both texts together
    counts = sum(text_counts, Counter())
    share = len(val) / (len(train) + len(val))

    # the rarest characters show what does not belong into a text
    rarest = sorted(counts, key=lambda c: (counts[c], c))[:3]
    return [
        *map(text_line, ("text        ", "validation  "), texts, text_counts),
        f"split       {len(train):,} characters to train on, "
        f"{len(val):,} ({share:.1%}) to validate on{validates and ': '}{validates}",
        f"rarest      {', '.join(f'{describe(c)} {times(counts[c])}' for c in rarest)}",
        *(f"note: {note}" for note in chain.from_iterable(text.notes for text in texts)),
        *(f"note: {note}" for note in unusual(counts, vocabulary, train, val)),
    ]


def size_advice(parameters: int, characters: int) -> str | None:
    """Return a note that names a better config if the model is too large or small for the text."""
    # the recipe for texts of this length, and the sizes that suit them
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


def length_advice(train: Split, val: Split, block_size: int) -> str | None:
    """Return a note if items are longer than the context, or the training text is shorter."""
    items, longest = train.items + val.items, len(train) - 1

    # an item of a list should fit into the context
    if longer := sum(end - start - 1 > block_size for start, end in items):
        return (
            f"note: block_size {block_size} is too short for {counted(longer, 'item')}: the model "
            "never sees such an item, with its end, as a whole"
        )

    # a text should fill it
    if not items and longest < block_size:
        return (
            f"note: the training text is shorter than the context, block_size {block_size}: each "
            f"batch has padding; --block_size={longest} is enough"
        )
    return None


def text_line(label: str, text: Text, counts: Counter[str]) -> str:
    """Return a line about a text: where it is, and its size."""
    files = f"{len(text.files):,} files, " if len(text.files) > 1 else ""
    return f"{label}{text.path}: {files}{counts.total():,} characters, {len(counts):,} distinct"


def unusual(counts: Counter[str], vocabulary: str, train: Split, val: Split) -> Iterator[str]:
    """Yield what is unusual about a text, but not an error."""
    # control characters: the output of a program, or the wrong encoding
    if controls := [c for c in counts if unicodedata.category(c) == "Cc" and c not in "\t\n"]:
        names = first_few(f"U+{ord(c):04X} {times(counts[c])}" for c in sorted(controls))
        yield f"control characters kept: {names}"

    # characters that data.min_count or a checkpoint's vocabulary leaves out
    if rare := sorted(counts.keys() - set(vocabulary)):
        total = times(sum(counts[c] for c in rare))
        yield (
            f"{counted(len(rare), 'rare character')} mapped to {describe(UNK)}, {total} in all: "
            f"{first_few(map(describe, rare))}"
        )

    # characters that only the validation text has
    in_train, in_val = (count_ids(split, len(vocabulary)) for split in (train, val))
    if unseen := np.flatnonzero((in_val > 0) & (in_train == 0)).tolist():
        names = first_few(describe(vocabulary[i]) for i in unseen)
        total = times(int(in_val[unseen].sum()))
        yield f"{counted(len(unseen), 'character')} only in the validation text, {total}: {names}"

    # validation text that is in the training text too
    if known := known_pieces(train, val):
        yield (
            f"{known} of {PIECES} pieces of the validation text, of {PIECE_LENGTH} characters "
            "each, are in the training text too, so the validation loss is too low; is something "
            "there twice?"
        )


def count_ids(split: Split, vocab_size: int) -> np.ndarray:
    """Count each id in a split: (vocab_size,)."""
    # bincount makes eight bytes of each id: slice by slice, a long text fits into memory
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(split), SLICE):
        counts += np.bincount(split.ids[start : start + SLICE], minlength=vocab_size)
    return counts


def known_pieces(train: Split, val: Split) -> int:
    """Return how many of PIECES pieces of a validation text also stand in the training text."""
    last = len(val) - PIECE_LENGTH
    if last < 0 or train.items:  # equal items are never on both sides
        return 0
    # as bytes, which Python searches quickly
    text = train.ids.tobytes()

    # a few pieces, spread evenly, are enough to find a text that stands there twice
    starts = np.linspace(0, last, PIECES).astype(int)
    return sum(val.ids[start : start + PIECE_LENGTH].tobytes() in text for start in starts)


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
