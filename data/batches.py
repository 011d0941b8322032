"""Training batches as a pure function of (seed, batch number), and the windows of an evaluation.

An epoch cuts the text into windows of `block_size` predictions, and visits them in random order.
Each character is predicted exactly once. `permute` computes the order for the windows of one batch
at a time. So shuffling a text of any size takes no memory, and a resumed run, or one with several
processes, sees the same batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

import numpy as np

ROUNDS = 3  # of the Feistel network in `permute`
IGNORED = -100  # the target of characters that do not count; cross_entropy ignores it by default


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the validation part of a corpus.

    ids      of its characters
    items    (start, end) of each item of a list; none: the text is one piece
    targets  if not all characters count for the loss: the ids, with IGNORED for those that do not

    No window crosses the end of an item. An item begins one character early, with the end of the
    separator before it.
    """

    ids: np.ndarray
    items: tuple[tuple[int, int], ...] = ()
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The pieces that windows are cut from: the items, or the whole text."""
        return self.items or ((0, len(self.ids)),)

    def window(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the targets of the window of `length` predictions at `start`."""
        # one character more than predictions: the last is only predicted
        text = self.ids[start : start + length + 1]
        if self.targets is None:
            return text[:-1], text[1:]
        return text[:-1], self.targets[start + 1 : start + length + 1]

    def spread(self, predictions: int, block_size: int) -> "Split":
        """Return about this many predictions, in pieces spread evenly over the split, one or more.

        The pieces of a text are windows of `block_size` predictions, those of a list are items.
        """
        total = sum(end - start - 1 for start, end in self.segments)
        if self.items:
            # whole items: as many as have about so many predictions in all
            count = max(1, round(len(self.items) * predictions / total))
            chosen = np.linspace(0, len(self.items) - 1, count).astype(int)
            pieces = tuple(self.items[i] for i in chosen)
        else:
            # windows, the first at the beginning of the text, the last at its end
            length = min(block_size, total)
            count = max(1, round(predictions / length))
            starts = np.linspace(0, total - length, count).astype(int).tolist()
            pieces = tuple((start, start + length + 1) for start in starts)
        return Split(self.ids, pieces, self.targets)


class Batches:
    """The batches of a run: `batches(i)` returns (x, y), int64 of shape (batch_size, block_size).

    y is x shifted by one character. With gradient accumulation, i counts micro-batches, not steps.

        ids = 0 1 2 3 4 5 6 7 8 9, block_size 3, batch_size 2, seed 0: four windows per epoch
        batches(0): x = [[1, 2, 3], [7, 8, 0]], y = [[2, 3, 4], [8, 9, _]]    cut after 1, 4 and 7
        batches(1): x = [[4, 5, 6], [0, 0, 0]], y = [[5, 6, 7], [1, _, _]]    _ is IGNORED

    Row r of batch i is window i * batch_size + r of an endless sequence of epochs. In each epoch, a
    text is cut after its first o predictions, o from 1 to `block_size` at random, and then after
    every `block_size`. So its first and its last window may be shorter, and the last one empty.

    An item of a list that fits is one window. A longer one is cut at random too, but into as few
    windows as it needs, none of them empty. Every epoch has `windows_per_epoch` windows.
    """

    def __init__(self, split: Split, block_size: int, batch_size: int, seed: int):
        self._split, self._block_size, self._batch_size = split, block_size, batch_size
        # an array: the hash overflows on purpose, and NumPy warns if a single number does
        self._seed = np.array([seed], dtype=np.uint64)

        # windows of each segment: as few as it needs; a text has one more, to be cut anywhere
        segments = np.array(split.segments, dtype=np.int64)
        self._starts, self._predictions = segments[:, 0], segments[:, 1] - segments[:, 0] - 1
        self._counts = -(-self._predictions // block_size)  # rounded up
        if not split.items and self._counts[0] > 1:
            self._counts += 1

        # an epoch has the windows of the first segment, then those of the second ...
        self._first_window = np.cumsum(self._counts) - self._counts
        self.windows_per_epoch = int(self._counts.sum())

        # with answers: how many targets count, up to and including each
        self._counted_through = None
        if split.targets is not None:
            self._counted_through = np.cumsum(split.targets != IGNORED)

    def __call__(self, i: int, rows: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of batch i, or only some of its rows: those that one process trains on."""
        starts, lengths = self._windows(i, rows)
        # where a window is shorter, x is padded with id 0, and no target counts
        x = np.zeros((len(starts), self._block_size), dtype=np.int64)  # (rows, block_size)
        y = np.full_like(x, IGNORED)
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            x[row, :length], y[row, :length] = self._split.window(start, length)
        return x, y

    def predictions(self, i: int) -> int:
        """Return the number of predictions in batch i: its targets that are not IGNORED."""
        starts, lengths = self._windows(i, slice(None))
        if self._counted_through is None:
            return int(lengths.sum())
        # those through the last target, without those before the first
        return int((self._counted_through[starts + lengths] - self._counted_through[starts]).sum())

    def epochs(self, batches: int) -> float:
        """Return the number of epochs in this many batches."""
        return batches * self._batch_size / self.windows_per_epoch

    def _windows(self, i: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and the number of predictions of each window of batch i."""
        # the numbers of its rows in the endless sequence: an epoch, and a place in its order
        first = i * self._batch_size
        numbers = np.arange(first, first + self._batch_size, dtype=np.uint64)[rows]
        epoch, index = np.divmod(numbers, np.uint64(self.windows_per_epoch))  # each (rows,)

        # which window comes at that place, in which segment it lies, and its number there
        key = splitmix(self._seed, epoch)
        window = permute(index, self.windows_per_epoch, key).astype(np.int64)
        segment = np.searchsorted(self._first_window, window, side="right") - 1
        number = window - self._first_window[segment]

        # where this epoch first cuts the segment: at random, but late enough for the windows after
        # it to reach the end (~key: independent of the order)
        b, predictions = self._block_size, self._predictions[segment]
        earliest = np.maximum(1, predictions - (self._counts[segment] - 1) * b)
        random = splitmix(~key, segment.astype(np.uint64)) % (b + 1 - earliest).astype(np.uint64)
        first_cut = earliest + random.astype(np.int64)

        # a window is what lies between two cuts; the ends of the segment are cuts too
        start, end = (np.clip(first_cut + n * b, 0, predictions) for n in (number - 1, number))
        return self._starts[segment] + start, end - start


def evaluation_windows(
    split: Split, block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the windows of an evaluation, as batches (x, y) of int64.

    The windows of a batch have the same length, so no batch has padding, and its shape is at most
    (batch_size, block_size).
    """
    _, starts, lengths = windows_of(split, block_size)
    # the longest first: if they fit into the memory, all do
    for length in np.unique(lengths)[::-1].tolist():
        same_length = starts[lengths == length].tolist()
        # the windows of this length, batch_size at a time
        for i in range(0, len(same_length), batch_size):
            windows = [split.window(start, length) for start in same_length[i : i + batch_size]]
            x, y = (np.stack(part).astype(np.int64) for part in zip(*windows, strict=True))
            yield x, y


def windows_of(split: Split, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut a split for an evaluation: return segment, start and length of each window.

    The windows do not overlap and have every prediction once. The last one of a segment may be
    shorter than `block_size`. The longest windows come first.
    """
    # how many windows each segment needs
    segments = np.array(split.segments, dtype=np.int64)
    starts, predictions = segments[:, 0], np.maximum(0, segments[:, 1] - segments[:, 0] - 1)
    counts = -(-predictions // block_size)  # rounded up

    # the segment of each window, and its number there, counted from 0
    segment = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(segment)) - (np.cumsum(counts) - counts)[segment]
    lengths = np.minimum(block_size, predictions[segment] - number * block_size)

    # stable: windows of one length stay in the order of the text
    longest_first = np.argsort(-lengths, kind="stable")
    windows = segment, starts[segment] + number * block_size, lengths
    return tuple(values[longest_first] for values in windows)


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Shuffle 0..n-1: return the number to which the permutation `key` maps each index (uint64).

        key = splitmix([2], [0])
        permute([0, 1, 2, 3, 4], 5, key) -> [2, 1, 3, 0, 4]
        permute([3], 5, key) -> [0]

    A Feistel network on a grid of about sqrt(n) x sqrt(n) cells. The index is a cell; its row and
    its column are shifted in turn, each by a hash of the other. Every shift is invertible, so no
    two indices end in the same cell. A result of n or more is permuted again until it is below n
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    # the grid: as square as possible, with n cells or a few more
    rows = np.uint64(isqrt(n - 1) + 1)
    columns = np.uint64(-(-n // int(rows)))
    row, column = np.divmod(index, columns)
    # shift the row by a hash of the column, then the column by a hash of the row
    for i in range(ROUNDS):
        row = (row + splitmix(key + np.uint64(2 * i), column)) % rows
        column = (column + splitmix(key + np.uint64(2 * i + 1), row)) % columns

    # a cell beyond n: walk on
    result = row * columns + column
    beyond = result >= n
    if beyond.any():
        result[beyond] = permute(result[beyond], n, np.broadcast_to(key, result.shape)[beyond])
    return result


def splitmix(seed: np.ndarray, i: np.ndarray) -> np.ndarray:
    """Return number i of the SplitMix64 sequence with this seed (uint64 arrays, broadcast).

    Number 0 is the hash of the seed itself. A number is computed directly, without those before it,
    and is the same in every version of NumPy. (Steele, Lea and Flood 2014, "Fast Splittable
    Pseudorandom Number Generators".)
    """
    # the state is a counter; two rounds of "shift, xor, multiply" make it look random
    z = seed + i * np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
