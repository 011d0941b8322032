"""Lists: texts whose items are learned one by one, such as names, recipes, or sums with answers.

A list is laid out as `separator item separator item ... separator`. The segment of an item begins
with the last character of the separator before it and ends with its own separator. So a model
learns how an item begins and ends, and never sees another one:

    separator "\\n", items "ab" and "c":  the text "\\nab\\nc\\n", segments "\\nab\\n" and "\\nc\\n"
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np

from common.errors import DataError
from configs.fields import brief, unescape
from configs.schema import DataConfig
from data.batches import IGNORED, Split
from data.text import Text


@dataclass(frozen=True)
class ItemFormat:
    """The format of a list: the ends of its items, and of their questions if they have answers."""

    separator: str
    answer_after: str = ""

    @classmethod
    def of(cls, data: DataConfig) -> "ItemFormat | None":
        """Return the format that the settings describe; None if the text is not a list."""
        if not data.separator:
            return None
        return cls(unescape(data.separator), unescape(data.answer_after))

    @property
    def start(self) -> str:
        """The character that a model sees before an item: the last one of a separator."""
        return self.separator[-1]

    def cut(self, text: str) -> list[str]:
        """Return the items of a text, without separators; empty ones are left out."""
        return [item for item in text.split(self.separator) if item]

    def question(self, item: str) -> str:
        """Return the item through `answer_after`."""
        return item[: item.index(self.answer_after) + len(self.answer_after)]

    def check_answers(self, path: Path | str, contents: Sequence[str]) -> None:
        """Raise DataError if an item of these files has no `answer_after`."""
        count, first = 0, ""
        for content in contents:
            line = 1
            for item in content.split(self.separator):
                if item and self.answer_after not in item:
                    first = first or f"{brief(item)} in line {line:,}"
                    count += 1
                line += (item + self.separator).count("\n")
        if count:
            raise DataError(
                f"{path}: {count:,} items have no data.answer_after {brief(self.answer_after)}: "
                f"first {first}; correct or remove them"
            )

    def split(self, items: Sequence[str], encode: Callable[[str], np.ndarray]) -> Split:
        """Encode items into a split with a segment for each.

        With `answer_after`, only the answers and the ends of the items count for the loss.
        """
        ids = encode("".join([self.separator, *(item + self.separator for item in items)]))
        lengths = (len(item) + len(self.separator) for item in items)
        ends = list(accumulate(lengths, initial=len(self.separator)))
        segments = tuple((end - 1, next_end) for end, next_end in pairwise(ends))
        if not self.answer_after:
            return Split(ids, segments)
        targets = ids.astype(np.int32)
        for item, start in zip(items, ends, strict=False):
            targets[start : start + len(self.question(item))] = IGNORED
        return Split(ids, segments, targets)


def load_items(
    texts: Sequence[Text],
    item_format: ItemFormat,
    val_fraction: float,
    encode: Callable[[str], np.ndarray],
) -> tuple[Split, Split, list[str]]:
    """Cut a text, and the validation text if there is one, into items; split and encode them.

    Also return lines for the user. Raises DataError for a text in which the separator does not
    occur, or whose items have no answers or cannot be split.
    """
    # the items of each text
    parts = [read_items(text, item_format) for text in texts]
    needed = 3 - len(texts)  # a text that is split needs two
    for text, items in zip(texts, parts, strict=True):
        if len(set(items)) < needed:
            raise DataError(
                f"{text.path}: {len(set(items))} distinct items; at least {needed} are "
                "needed; add items, or correct data.separator"
            )

    # all items of the second text validate, or some of the only one
    train, val = parts if len(parts) > 1 else divide(parts[0], val_fraction)
    items, lengths = [*train, *val], [len(item) for item in (*train, *val)]
    lines = [
        f"items       {len(train):,} to train on, {len(val):,} to validate on, {len(set(items)):,} "
        f"distinct; median length {statistics.median(lengths):g} characters, longest "
        f"{max(lengths):,}"
    ]
    if len(parts) > 1 and (known := len(set(val) & set(train))):
        lines.append(
            f"note: {known:,} of {len(set(val)):,} distinct validation items are in the training "
            "text too"
        )

    return item_format.split(train, encode), item_format.split(val, encode), lines


def read_items(text: Text, item_format: ItemFormat) -> list[str]:
    """Return the items of a text; empty ones are left out.

    The end of a file ends an item. The items are in the order of their digests, so that the first
    ones are a fair sample of all. Raises DataError as `load_items` does.
    """
    if not any(item_format.separator in content for content in text.files):
        raise DataError(
            f"{text.path}: the separator {brief(item_format.separator)} never occurs in the text; "
            "correct data.separator"
        )
    item_format.check_answers(text.path, text.files)
    return sorted(chain.from_iterable(map(item_format.cut, text.files)), key=digest)


def divide(items: Sequence[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Divide items into those to train on and those to validate on.

    An item alone decides: it is for validation if its SHA-256, as a fraction of the largest, is
    below `val_fraction`. So equal items stay together, and no other item, seed or machine matters.
    If all are on one side, the one nearest to the limit changes sides.
    """
    ordered = sorted(map(digest, set(items)))
    count = sum(int.from_bytes(each) < val_fraction * 2**256 for each in ordered)
    last = ordered[max(1, min(count, len(ordered) - 1)) - 1]
    train = [item for item in items if digest(item) > last]
    val = [item for item in items if digest(item) <= last]
    return train, val


def digest(item: str) -> bytes:
    """Return the SHA-256 of an item."""
    return sha256(item.encode()).digest()


def long_item_notes(train: Split, val: Split, block_size: int) -> list[str]:
    """Return a note if items do not fit into a window of `block_size` predictions."""
    segments = train.segments + val.segments
    count = sum(end - start - 1 > block_size for start, end in segments)
    if count == 0:
        return []
    note = (
        f"note: {count:,} items with their ends are longer than block_size {block_size}: the model "
        "never sees such an item as a whole"
    )
    return [note]
