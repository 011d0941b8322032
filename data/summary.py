"""What was found in a text, in lines for people; and whether a model is of the right size
for it.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from common.errors import escape, first_few
from data import disk_cache
from data.batches import Split
from data.streaming import Passes
from data.tokenizer import FOLDED, CharTokenizer, named

PIECE = 2**20  # ids that are counted at a time
# of configs/mytext.yaml: up to so many characters of text, models of so many parameters fit
PRESETS = (
    ("up to 100 KB", 1e5, (0, 1.2e6)),
    ("up to 2 MB", 2e6, (3e5, 1.2e7)),
    ("up to 50 MB", 5e7, (2e6, 5e7)),
    ("beyond 50 MB", float("inf"), (8e6, float("inf"))),
)


def report(
    texts: Sequence[Passes], tokenizer: CharTokenizer, train: Split, val: Split
) -> list[str]:
    """What a person wants to know of a text before it is learnt from; what is unusual about it
    comes first.
    """
    counts, total = counts_of(texts), len(train) + len(val)
    rarest = sorted(counts, key=lambda c: (counts[c], c))[:5]
    vocabulary = tokenizer.vocabulary
    return [
        *(f"note: {escape(note)}" for note in _notes(texts, counts, vocabulary, val)),
        f"text        {len(train):,} characters to train on ({len(train) / total:.1%}), "
        f"{len(val):,} to validate on ({len(val) / total:.1%})",
        f"vocabulary  {len(vocabulary):,} characters: "
        f"{escape(vocabulary[:100])}{'...' * (len(vocabulary) > 100)}",
        f"rarest      {', '.join(f'{named(c)} {_times(counts[c])}' for c in rarest)}",
    ]


def counts_of(texts: Sequence[Passes]) -> Counter[str]:
    """How often each character occurs in all of them."""
    return sum((Counter(text.census.counts) for text in texts), Counter())


def fitting(parameters: int, characters: int) -> str | None:
    """One line with the preset for so much text, where the model is not of a size that fits it."""
    preset, _, (low, high) = next(each for each in PRESETS if characters <= each[1])
    if low <= parameters <= high:
        return None
    fault, result = (
        ("many", "learns it by heart")
        if parameters > high
        else ("few", "learns less than there is")
    )
    return (
        f"note: {parameters:,} parameters are {fault} for {characters:,} characters: such a model "
        f"{result}; "
        f'the preset "{preset}" of configs/mytext.yaml fits'
    )


def _notes(
    texts: Sequence[Passes], counts: Counter[str], vocabulary: str, val: Split
) -> Iterator[str]:
    """What is unusual about a text and no error."""
    if marked := sum(text.marked for text in texts):
        yield f"a byte order mark begins {marked:,} file(s) and is left out"
    if crlf := sum(text.census.crlf for text in texts):
        yield (
            f"{crlf:,} lines end in \\r\\n, which is kept exactly; data.newlines=unix makes it \\n"
        )
    if controls := [c for c in counts if unicodedata.category(c) == "Cc" and c not in "\t\n\r"]:
        shown = first_few(f"U+{ord(c):04X} {_times(counts[c])}" for c in sorted(controls))
        yield f"control characters are kept: {shown}"
    if folded := sorted(counts.keys() - set(vocabulary)):
        times = _times(sum(counts[c] for c in folded))
        yield (
            f"{len(folded):,} rare characters, {times} in all, are read as {named(FOLDED)}: "
            f"{first_few(map(named, folded))}"
        )
    if unseen := _unseen(counts, vocabulary, val):
        yield (
            f"{len(unseen):,} characters of the validation text, {_times(sum(unseen.values()))} in "
            f"all, are not in the "
            f"training text: {first_few(map(named, unseen))}"
        )
    if any(text.is_large for text in texts):
        place = disk_cache.folder()
        yield f"the encoded text lies in {place} for the next start, and may be deleted"


def _unseen(counts: Counter[str], vocabulary: str, val: Split) -> dict[str, int]:
    """The characters, with their number, that occur nowhere but in the validation text."""
    folded = sum(counts.values()) - sum(counts[c] for c in vocabulary if c != FOLDED)
    everywhere = counts | {FOLDED: folded}
    here = zip(vocabulary, _count(val, len(vocabulary)).tolist(), strict=True)
    return {c: count for c, count in here if 0 < count == everywhere[c]}


def _count(split: Split, size: int) -> np.ndarray:
    counts = np.zeros(size, dtype=np.int64)
    for start, end in split.segments:
        for first in range(start, end, PIECE):
            counts += np.bincount(split.ids[first : min(first + PIECE, end)], minlength=size)
    return counts


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
