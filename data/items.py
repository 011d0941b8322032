"""Lists: texts whose items are independent training examples: names, recipes, sums with answers.

A list is laid out as `separator item separator item ... separator`. The segment of an item begins
with the last character of the separator before it and ends with its own separator. So a model
learns how an item begins and ends, and never sees two items at once:

    separator "\\n", items "ab" and "c":  the text "\\nab\\nc\\n", segments "\\nab\\n" and "\\nc\\n"
"""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, pairwise

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
    def start_character(self) -> str:
        """The character that a model sees before an item: the last one of a separator."""
        return self.separator[-1]

    def count_blank_ends(self, content: str) -> int:
        """Count the lines that end in spaces or tabs, which are no part of an item.

        Returns 0 if the separator or `answer_after` contains a space or a tab, which then matter.
        """
        if re.search("[ \t]", self.separator + self.answer_after):
            return 0
        return content.count(" \n") + content.count("\t\n") + content.endswith((" ", "\t"))

    def without_blank_ends(self, content: str) -> str:
        """Return a text without the spaces and tabs that `count_blank_ends` counts."""
        if not self.count_blank_ends(content):
            return content
        return "\n".join(line.rstrip(" \t") for line in content.split("\n"))

    def items_of(self, path: str, contents: Sequence[str]) -> list[str]:
        """Return the items of some files, without the newlines around them; none spans two files.

        Raises DataError if one has no `answer_after`.
        """
        items = []
        for content in contents:
            pieces = self.without_blank_ends(content).split(self.separator)
            items += [piece.lstrip("\n") for piece in pieces if piece.strip()]

        lacking = [item for item in items if self.answer_after not in item]
        if lacking:
            raise DataError(
                f"{path}: data.answer_after {brief(self.answer_after)} is missing in "
                f"{counted(len(lacking), 'item')}, first: {brief(lacking[0])}; "
                "correct or remove them"
            )
        return list(map(self.trim_end, items))

    def trim_end(self, item: str) -> str:
        """Remove the newlines at the end of an item, but keep those that end its question.

        Files often have empty lines between items, or a newline before an end-of-text marker.
        """
        question = self.question(item)
        return question + item[len(question) :].rstrip("\n")

    def question(self, item: str) -> str:
        """Return the item through `answer_after`; "" if items have no answers."""
        if not self.answer_after:
            return ""
        return item[: item.index(self.answer_after) + len(self.answer_after)]

    def as_split(self, items: Sequence[str], encode: Callable[[str], np.ndarray]) -> Split:
        """Encode items into a split.

        With `answer_after`, only the answers and the ends of the items count for the loss.
        """
        ids = encode("".join([self.separator, *(item + self.separator for item in items)]))
        # where each item begins, and where the last one ends
        lengths = (len(item) + len(self.separator) for item in items)
        starts = list(accumulate(lengths, initial=len(self.separator)))
        segments = tuple((start - 1, end) for start, end in pairwise(starts))
        if not self.answer_after:
            return Split(ids, segments, is_list=True)

        # questions are unpredictable
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

    Also return the question of a validation item, as an example of a prompt, and lines for the
    user. Raises DataError for a text in which the separator does not occur, or with too few items.
    """
    lists, blank = zip(*(read_items(text, item_format) for text in texts), strict=True)

    # a single list is divided, so it needs two items
    needed = 1 if len(texts) == 2 else 2
    for text, items in zip(texts, lists, strict=True):
        if len(set(items)) < needed:
            raise DataError(
                f"{text.path}: {counted(len(set(items)), 'distinct item')}; at least {needed} are "
                "needed; add items, or correct data.separator"
            )

    train, val = lists if len(lists) == 2 else hold_out(lists[0], val_fraction)
    items, lengths = [*train, *val], [len(item) for item in (*train, *val)]

    lines = [
        f"items       {len(train):,} to train on, {len(val):,} to validate on, {len(set(items)):,} "
        f"distinct; median length {statistics.median(lengths):g} characters, longest "
        f"{max(lengths):,}"
    ]
    if sum(blank):
        lines.append(f"note: blanks at the ends of {counted(sum(blank), 'line')} removed")
    if len(lists) == 2 and (known := len(set(val) & set(train))):
        lines.append(
            f"note: {known:,} of {len(set(val)):,} distinct validation items are in the training "
            "text too"
        )

    train_split, val_split = (item_format.as_split(part, encode) for part in (train, val))
    return train_split, val_split, item_format.question(val[0]), lines


def read_items(text: Text, item_format: ItemFormat) -> tuple[list[str], int]:
    """Return the items of a text, sorted by SHA-256: a deterministic shuffle.

    Also return how many lines ended in blanks. Raises DataError if the separator does not occur, or
    an item has no `answer_after`.
    """
    contents = list(map(item_format.without_blank_ends, text.contents))
    if not any(item_format.separator in content for content in contents):
        raise DataError(
            f"{text.path}: the separator {brief(item_format.separator)} never occurs in the text; "
            "correct data.separator"
        )
    items = item_format.items_of(text.path, contents)
    blank = sum(map(item_format.count_blank_ends, text.contents))
    # shuffled, because evaluations show the first few wrong items
    return sorted(items, key=digest), blank


def hold_out(examples: Sequence[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Divide examples, which are items or the contents of files, into training and validation.

    An example is held out if its SHA-256, as a fraction of 2**256, is below `val_fraction`. So
    equal examples stay together, and neither other examples nor the seed nor the machine matters.
    If all are on one side, the one nearest to the limit changes sides.
    """
    digests = sorted(map(digest, set(examples)))
    count = sum(int.from_bytes(number) < val_fraction * 2**256 for number in digests)
    last = digests[max(1, min(count, len(digests) - 1)) - 1]
    train = [example for example in examples if digest(example) > last]
    val = [example for example in examples if digest(example) <= last]
    return train, val


def digest(example: str) -> bytes:
    """Return the SHA-256 of an item or of the content of a file."""
    return sha256(example.encode()).digest()
