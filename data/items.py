"""Lists: texts whose items are independent training examples: names, recipes, sums with answers.

A list is laid out as `separator item separator item ... separator`. The segment of an item begins
with the last character of the separator before it and ends with its own separator. So a model
learns how an item begins and ends, and never sees two items at once:

    separator "\\n", items "ab" and "c":  the text "\\nab\\nc\\n", segments "\\nab\\n" and "\\nc\\n"
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from common.errors import DataError, counted
from configs.fields import brief, unescape
from configs.schema import DataConfig
from data.batches import IGNORED, Split
from data.text import Text


@dataclass(frozen=True)
class ItemFormat:
    """The format of a list: what ends an item, and, if items have answers, what ends a question."""

    separator: str
    answer_after: str = ""

    @classmethod
    def of(cls, data: DataConfig) -> "ItemFormat | None":
        """Return the format that the settings describe; None if the text is not a list."""
        if not data.separator:
            return None
        # in the settings \n is two characters, in the text it is one
        return cls(unescape(data.separator), unescape(data.answer_after))

    @property
    def start(self) -> str:
        """The character that a model sees before an item: the last one of a separator."""
        return self.separator[-1]

    def pieces_of(self, contents: Sequence[str]) -> list[str]:
        """Split files at the separators; a piece never spans two files."""
        return [piece for content in contents for piece in content.split(self.separator)]

    def items_of(self, path: Path | str, contents: Sequence[str]) -> list[str]:
        """Return the items of some files: the pieces with a visible character, trimmed.

        Raises DataError if one has no `answer_after`.
        """
        # a piece of blanks, such as the one after the last separator, is no item
        pieces = [piece for piece in self.pieces_of(contents) if piece.strip()]

        # without answers this is "", which every item contains
        lacking = [item for item in pieces if self.answer_after not in item.lstrip("\n")]
        if lacking:
            raise DataError(
                f"{path}: data.answer_after {brief(self.answer_after)} is missing in "
                f"{counted(len(lacking), 'item')}, first: {brief(lacking[0])}; "
                "correct or remove them"
            )
        return list(map(self.trim, pieces))

    def trim(self, item: str) -> str:
        """Remove the newlines at both ends of an item, but keep those that end its question.

        Files often have empty lines between items, or a newline before an end-of-text marker.
        """
        item = item.lstrip("\n")
        question = self.question(item)
        return question + item[len(question) :].rstrip("\n")

    def question(self, item: str) -> str:
        """Return the item through `answer_after`; "" if items have no answers."""
        return item[: item.index(self.answer_after) + len(self.answer_after)]

    def as_split(self, items: Sequence[str], encode: Callable[[str], np.ndarray]) -> Split:
        """Encode items into a split.

        With `answer_after`, only the answers and the ends of the items count for the loss.
        """
        # separator item separator item ... separator
        ids = encode("".join([self.separator, *(item + self.separator for item in items)]))
        # where each item begins, and where the last one ends
        lengths = (len(item) + len(self.separator) for item in items)
        starts = list(accumulate(lengths, initial=len(self.separator)))

        # a segment includes the character before the item, from which its first is predicted
        segments = tuple((start - 1, end) for start, end in pairwise(starts))
        if not self.answer_after:
            return Split(ids, segments, is_list=True)

        # mask the questions: they are unpredictable
        targets = ids.astype(np.int32)
        for item, start in zip(items, starts, strict=False):
            targets[start : start + len(self.question(item))] = IGNORED
        return Split(ids, segments, is_list=True, targets=targets)


def split_list(
    texts: Sequence[Text],
    item_format: ItemFormat,
    val_fraction: float,
    encode: Callable[[str], np.ndarray],
) -> tuple[Split, Split, str, list[str]]:
    """Encode a list, or one list to train on and another to validate on, as two splits.

    Also return the question of a validation item, and lines for the user. Raises DataError for a
    text in which the separator does not occur, or with too few items.
    """
    lists = [read_items(text, item_format) for text in texts]

    # a single list is divided, so it needs two items
    needed = 1 if len(texts) == 2 else 2
    for text, items in zip(texts, lists, strict=True):
        if len(set(items)) < needed:
            raise DataError(
                f"{text.path}: {counted(len(set(items)), 'distinct item')}; at least {needed} are "
                "needed; add items, or correct data.separator"
            )

    # hold out the second list, or some items of the only one
    train, val = lists if len(lists) == 2 else hold_out(lists[0], val_fraction)
    items, lengths = [*train, *val], [len(item) for item in (*train, *val)]

    # describe them to the user
    lines = [
        f"items       {len(train):,} to train on, {len(val):,} to validate on, {len(set(items)):,} "
        f"distinct; median length {statistics.median(lengths):g} characters, longest "
        f"{max(lengths):,}"
    ]
    lines += trimming_notes(texts, item_format)
    if len(lists) == 2 and (known := len(set(val) & set(train))):
        lines.append(
            f"note: {known:,} of {len(set(val)):,} distinct validation items are in the training "
            "text too"
        )

    # the question is an example of how to prompt this model
    train_split, val_split = (item_format.as_split(part, encode) for part in (train, val))
    return train_split, val_split, item_format.question(val[0]), lines


def read_items(text: Text, item_format: ItemFormat) -> list[str]:
    """Return the items of a text, sorted by SHA-256: a deterministic shuffle.

    Raises DataError if the separator does not occur, or an item has no `answer_after`.
    """
    if not any(item_format.separator in content for content in text.contents):
        raise DataError(
            f"{text.path}: the separator {brief(item_format.separator)} never occurs in the text; "
            "correct data.separator"
        )
    # shuffled, because evaluations show the first few items
    return sorted(item_format.items_of(text.path, text.contents), key=digest)


def trimming_notes(texts: Sequence[Text], item_format: ItemFormat) -> Iterator[str]:
    """Yield how many items had newlines at their ends, and how many had no visible character."""
    # split again: `items_of` returns the items already trimmed
    pieces = [piece for text in texts for piece in item_format.pieces_of(text.contents)]
    if trimmed := sum(item_format.trim(piece) != piece for piece in pieces if piece.strip()):
        yield f"note: newlines removed at the ends of {counted(trimmed, 'item')}"
    if blank := sum(piece.strip("\n") != "" and not piece.strip() for piece in pieces):
        yield f"note: {counted(blank, 'item')} without a visible character left out"


def hold_out(examples: Sequence[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Divide examples, which are items or the contents of files, into training and validation.

    An example is held out if its SHA-256, as a fraction of 2**256, is below `val_fraction`. So
    equal examples stay together, and neither other examples nor the seed nor the machine matters.
    If all are on one side, the one nearest to the limit changes sides.
    """
    # count the distinct examples below the limit
    digests = sorted(map(digest, set(examples)))
    count = sum(int.from_bytes(number) < val_fraction * 2**256 for number in digests)
    # hold out at least one, but not all
    last = digests[max(1, min(count, len(digests) - 1)) - 1]
    train = [example for example in examples if digest(example) > last]
    val = [example for example in examples if digest(example) <= last]
    return train, val


def digest(example: str) -> bytes:
    """Return the SHA-256 of an item or of the content of a file."""
    return sha256(example.encode()).digest()
