"""A summary of a text for the user, with notes on what is unusual about it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from common.words import first_few, plural, quoted_character
from data.batches import Split
from data.text import Text
from data.tokenizer import CHUNK, UNK

# passages of the validation text to look for in the training text, and their length
PASSAGES, PASSAGE_LENGTH = 20, 200


def summarize(
    texts: Sequence[Text],
    text_counts: Sequence[Counter[str]],
    vocabulary: str,
    train: Split,
    val: Split,
    max_val: int,
) -> list[str]:
    """Return the summary of a training text and its validation text; the notes come last.

    `text_counts` has the character counts of each text.
    """
    counts = sum(text_counts, Counter())
    share = len(val) / (len(train) + len(val))
    windows = ""
    if 0 < max_val < len(val):
        windows = f"; an evaluation predicts at most {max_val:,} of them, evenly spaced"
    # the rarest characters show what does not belong in a text
    rarest = sorted(counts, key=lambda c: (counts[c], c))[:3]
    rarest = [f"{quoted_character(c)} {plural(counts[c], 'time')}" for c in rarest]
    return [
        *(
            f"{label:<12}{text.path}: {plural(len(text.files), 'file')}, "
            f"{characters.total():,} characters, {len(characters):,} distinct"
            for label, text, characters in zip(
                ("text", "validation"), texts, text_counts, strict=False
            )
        ),
        f"split       {len(train):,} characters to train on, "
        f"{len(val):,} ({share:.1%}) to validate on{windows}",
        f"rarest      {', '.join(rarest)}",
        *(f"note: {note}" for note in chain.from_iterable(text.notes for text in texts)),
        *(f"note: {note}" for note in unusual(counts, vocabulary, train, val)),
    ]


def length_advice(train: Split, val: Split, block_size: int) -> str | None:
    """Return a note if items are longer than the context, or the training text is shorter."""
    segments, longest = train.segments + val.segments, len(train) - 1
    if not train.is_list:
        if longest >= block_size:
            return None
        return (
            f"note: the training text is shorter than the context, block_size {block_size}: each "
            f"batch has padding; for a new model, --block_size={longest} is enough"
        )
    if longer := sum(end - start - 1 > block_size for start, end in segments):
        return (
            f"note: block_size {block_size} is too short for {plural(longer, 'item')}: the model "
            "never sees such an item, with its end, as a whole"
        )
    return None


def unusual(counts: Counter[str], vocabulary: str, train: Split, val: Split) -> Iterator[str]:
    """Yield notes on what is unusual about a text, but no error."""
    # left out by min_count or by a checkpoint's vocabulary
    if rare := sorted(counts.keys() - set(vocabulary)):
        names = first_few(map(quoted_character, rare))
        yield f"{plural(len(rare), 'rare character')} mapped to {quoted_character(UNK)}: {names}"

    in_train, in_val = (count_ids(split, len(vocabulary)) for split in (train, val))
    if unseen := np.flatnonzero((in_val > 0) & (in_train == 0)).tolist():
        names = first_few(quoted_character(vocabulary[i]) for i in unseen)
        yield f"{plural(len(unseen), 'character')} only in the validation text: {names}"

    if leaked := count_leaked_passages(train, val):
        yield (
            f"{leaked} of {PASSAGES} passages of the validation text, of {PASSAGE_LENGTH} "
            "characters each, are in the training text too, so the validation loss is too low; is "
            "part of the text duplicated?"
        )


def count_ids(split: Split, vocab_size: int) -> np.ndarray:
    """Count each id in a split: (vocab_size,)."""
    # in chunks, because bincount converts every id to eight bytes
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(split), CHUNK):
        counts += np.bincount(split.ids[start : start + CHUNK], minlength=vocab_size)
    return counts


def count_leaked_passages(train: Split, val: Split) -> int:
    """Return how many of PASSAGES passages of the validation text are in the training text too."""
    last = len(val) - PASSAGE_LENGTH
    if last < 0 or train.is_list:  # split_list compares the items of lists
        return 0
    text = train.ids.tobytes()  # Python searches bytes quickly
    starts = np.linspace(0, last, PASSAGES).astype(int)
    return sum(val.ids[start : start + PASSAGE_LENGTH].tobytes() in text for start in starts)
