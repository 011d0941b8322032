"""Lists: texts whose items are independent training examples: names, recipes, sums with answers.

A list is laid out as `separator item separator item ... separator`. The segment of an item begins
with the last character of the separator before it and ends with its own separator. So a model
learns how an item begins and ends, and never sees two items at once:

    separator "\\n", items "ab" and "c":  the text "\\nab\\nc\\n", segments "\\nab\\n" and "\\nc\\n"
"""

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, pairwise

import numpy as np

from common.errors import DataError
from common.words import plural, quoted
from configs.fields import parse_escapes
from configs.schema import DataConfig
from data.batches import IGNORED, Split

FEW_ITEMS = 10  # the loss over fewer items says little


@dataclass(frozen=True)
class ItemFormat:
    """The format of a list: what ends an item, and, if items have answers, what ends a question."""

    separator: str
    answer_after: str = ""

    @classmethod
    def from_settings(cls, data: DataConfig) -> "ItemFormat | None":
        """Return the format that the settings describe; None if the text is not a list."""
        if not data.separator:
            return None
        # in the settings \n is two characters, in the text it is one
        return cls(parse_escapes(data.separator), parse_escapes(data.answer_after))

    @property
    def start_character(self) -> str:
        """The character that a model sees before an item: the last one of a separator."""
        return self.separator[-1]

    def strip_blank_ends(self, content: str) -> str:
        """Return a text without the spaces and tabs at the ends of its lines: no part of an item.

        All stay if the separator or `answer_after` contains a space or tab.
        """
        if re.search("[ \t]", self.separator + self.answer_after):
            return content
        return "\n".join(line.rstrip(" \t") for line in content.split("\n"))

    def items_of(self, path: str, files: Sequence[str]) -> list[str]:
        """Return the items of some files, without the newlines around them; none spans two files.

        Raises DataError for an item without `answer_after`.
        """
        items = []
        for file in files:
            pieces = self.strip_blank_ends(file).split(self.separator)
            items += [piece.lstrip("\n") for piece in pieces if piece.strip()]

        lacking = [item for item in items if self.answer_after not in item]
        if lacking:
            raise DataError(
                f"{path}: answer_after {quoted(self.answer_after)} is missing in "
                f"{plural(len(lacking), 'item')}, first: {quoted(lacking[0])}; "
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

    def join(self, items: Iterable[str]) -> str:
        """Return a text of items, each with its separator."""
        return "".join(item + self.separator for item in items)

    def encode_items(self, items: Sequence[str], encode: Callable[[str], np.ndarray]) -> Split:
        """Encode items into a split.

        With `answer_after`, only the answers and their separators count for the loss.
        """
        ids = encode(self.separator + self.join(items))
        # where each item begins, and where the last one ends
        lengths = (len(item) + len(self.separator) for item in items)
        starts = list(accumulate(lengths, initial=len(self.separator)))
        segments = tuple((start - 1, end) for start, end in pairwise(starts))
        if not self.answer_after:
            return Split(ids, segments, is_list=True)

        # questions cannot be predicted: their loss would be noise
        targets = ids.astype(np.int32)
        for item, start in zip(items, starts, strict=False):
            targets[start : start + len(self.question(item))] = IGNORED
        return Split(ids, segments, is_list=True, targets=targets)


def split_list(
    paths: Sequence[str],
    lists: Sequence[Sequence[str]],
    item_format: ItemFormat,
    val_fraction: float,
    encode: Callable[[str], np.ndarray],
) -> tuple[Split, Split, str, list[str]]:
    """Encode a list, or one list to train on and another to validate on, as two splits.

    Also return the question of a validation item, as an example of a prompt, and lines for the
    user. Raises DataError for too few items, as in a text without the separator.
    """
    # a single list is divided into two parts; a list to validate on may have a single item
    for path, items, needed in zip(paths, lists, (2, 1), strict=False):
        if len(set(items)) < needed:
            raise DataError(
                f"{path}: {plural(len(set(items)), 'distinct item')}, divided by the separator "
                f"{quoted(item_format.separator)}; at least {needed} are needed; add items, or "
                "correct the separator"
            )

    # shuffled, always in the same way, because evaluations show the first few wrong items
    lists = [sorted(items, key=digest) for items in lists]
    train, val = lists if len(lists) == 2 else hold_out(lists[0], val_fraction)
    lengths, distinct = [len(item) for item in (*train, *val)], len({*train, *val})
    lines = [
        f"items       {len(train):,} to train on, {len(val):,} to validate on, {distinct:,} "
        f"distinct; median length {statistics.median(lengths):g} characters, longest "
        f"{max(lengths):,}"
    ]
    if len(val) < FEW_ITEMS:
        lines.append(
            f"note: {plural(len(val), 'item')} to validate on: the validation loss says little"
        )
    if known := len(set(val) & set(train)):
        lines.append(
            f"note: {known:,} of {len(set(val)):,} distinct validation items are in the training "
            "text too"
        )

    train_split, val_split = (item_format.encode_items(part, encode) for part in (train, val))
    return train_split, val_split, item_format.question(val[0]), lines


def hold_out(items: Sequence[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Divide items into those to train on and those to validate on.

    An item is held out if its SHA-256, as a fraction of 2**256, is below `val_fraction`. So equal
    items stay together, and neither other items nor the seed nor the machine matters. If all are on
    one side, the one nearest to the limit changes sides.
    """
    digests = sorted(map(digest, set(items)))
    count = sum(int.from_bytes(number) < val_fraction * 2**256 for number in digests)
    last = digests[max(1, min(count, len(digests) - 1)) - 1]
    train = [item for item in items if digest(item) > last]
    val = [item for item in items if digest(item) <= last]
    return train, val


def digest(item: str) -> bytes:
    """Return the SHA-256 of an item."""
    return sha256(item.encode()).digest()
