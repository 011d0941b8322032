"""Lists: texts whose items are independent documents: names, recipes, sums with answers.

A list is laid out as `separator item separator item ... separator`. The document of an item begins
with the last character of the separator before it and ends with its own separator. So a model
learns how an item begins and ends, and never sees two items at once:

    separator "\\n", items "ab" and "c":  "\\nab\\nc\\n", documents "\\nab\\n" and "\\nc\\n"
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from common.console import DataError
from common.messages import counted, quoted
from configs.fields import parse_escapes
from configs.schema import DataConfig
from data.batches import IGNORE_INDEX, Split


@dataclass(frozen=True)
class ItemFormat:
    """The format of a list: what ends an item, and, if items have answers, what ends a question."""

    separator: str
    answer_after: str = ""

    @classmethod
    def from_settings(cls, data: DataConfig) -> "ItemFormat | None":
        """Return the format that the settings describe; None if the text is not a list."""
        # in the settings \n is two characters, in the text it is one
        texts = map(parse_escapes, (data.separator, data.answer_after))
        return cls(*texts) if data.separator else None

    def items_of(self, path: str, files: Sequence[str]) -> list[str]:
        """Return the items of some files; none spans two files.

        Blanks at the ends of lines, newlines around an item and blank items do not count. Raises
        DataError for an item without `answer_after`.
        """
        items = []
        for file in files:
            pieces = re.sub(r"[ \t]+$", "", file, flags=re.MULTILINE).split(self.separator)
            items += [piece.strip("\n") for piece in pieces if piece.strip()]
        if lacking := [item for item in items if self.answer_after not in item]:
            raise DataError(
                f"{path}: {counted(len(lacking), 'item')} without {quoted(self.answer_after)}, "
                f"first: {quoted(lacking[0])}; correct or remove them"
            )
        return items

    def question(self, item: str) -> str:
        """Return the item through `answer_after`; "" if items have no answers."""
        return item[: item.index(self.answer_after) + len(self.answer_after)]

    def join_items(self, items: Sequence[str]) -> str:
        """Return the text of a list."""
        return self.separator + "".join(item + self.separator for item in items)

    def encode_items(self, items: Sequence[str], encode: Callable[[str], np.ndarray]) -> Split:
        """Encode items into a split.

        With `answer_after`, only the answers and their separators count for the loss.
        """
        ids = encode(self.join_items(items))
        lengths = np.array([len(item) + len(self.separator) for item in items])
        starts = np.cumsum(lengths) - lengths + len(self.separator)
        documents = np.stack([starts - 1, starts + lengths], axis=1)
        if not self.answer_after:
            return Split(ids, documents)
        # questions cannot be predicted: their loss would be noise
        targets = ids.astype(np.int32)
        for item, start in zip(items, starts, strict=True):
            targets[start : start + len(self.question(item))] = IGNORE_INDEX
        return Split(ids, documents, targets)


def split_items(
    lists: Sequence[Sequence[str]], val_fraction: float
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the items to train on and to validate on: two lists, or a single one divided.

    An item of a single list is held out if its SHA-256, as a fraction of 2**256, is below
    `val_fraction`. So equal items stay together, and neither other items nor the seed nor the
    machine matters. If all are on one side, the one nearest to the limit changes sides.

    Raises DataError for too few items, as in a text without the separator.
    """
    if min(len(set(items)) for items in lists) < 2:
        raise DataError("separator: it yields fewer than 2 distinct items; add some, or correct it")
    # shuffled, always in the same way, because evaluations show the first few wrong items
    items, *val = (sorted(items, key=item_digest) for items in lists)
    if val:
        return items, *val
    digests = sorted(set(map(item_digest, items)))
    count = sum(int.from_bytes(number) < val_fraction * 2**256 for number in digests)
    last = digests[max(1, min(count, len(digests) - 1)) - 1]
    cut = bisect_right(items, last, key=item_digest)
    return items[cut:], items[:cut]


def item_digest(item: str) -> bytes:
    """Return the SHA-256 of an item."""
    return sha256(item.encode()).digest()
