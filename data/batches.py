"""Training batches as a pure function of (seed, batch number), and the windows of an evaluation.

    text     the characters of a split, as ids
    segment  a part of it that no window crosses: an item of a list, or else the whole text
    window   up to `block_size` consecutive predictions in a segment: a row of a batch
    batch    `batch_size` windows; the shorter ones are padded

An epoch cuts every segment into windows and visits them in random order. Each character is
predicted exactly once. `permute` computes the order for the windows of one batch at a time. So
shuffling a text of any size takes no memory, and a resumed run, or one with several processes, sees
the same batches.
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
    items    (start, end) of each item of a list, or of the pieces from `spread`; else empty
    targets  None if all characters are targets; otherwise a copy of ids with IGNORED where the
             loss skips one

    (start, end) includes the last character of the separator before the item: the input that
    predicts the item's first character.
    """

    ids: np.ndarray
    items: tuple[tuple[int, int], ...] = ()
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The (start, end) that windows are cut from: the items, or the whole text."""
        return self.items or ((0, len(self.ids)),)

    def window(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the targets of the window of `length` predictions at `start`."""
        # one character more than predictions: the last is only predicted
        text = self.ids[start : start + length + 1]
        if self.targets is None:
            return text[:-1], text[1:]
        return text[:-1], self.targets[start + 1 : start + length + 1]

    def spread(self, predictions: int, block_size: int) -> "Split":
        """Return a split of about `predictions` predictions: evenly spaced windows, at least one.

        From a list, it takes whole items instead of windows.
        """
        total = sum(end - start - 1 for start, end in self.segments)
        if self.items:
            # assume that all items have the average length
            count = max(1, round(len(self.items) * predictions / total))
            chosen = np.linspace(0, len(self.items) - 1, count).astype(int)
            segments = tuple(self.items[i] for i in chosen)
        else:
            # the first window at the beginning of the text, the last at its end
            length = min(block_size, total)
            count = max(1, round(predictions / length))
            starts = np.linspace(0, total - length, count).astype(int).tolist()
            segments = tuple((start, start + length + 1) for start in starts)
        return Split(self.ids, segments, self.targets)


class Batches:
    """The batches of a run: `batches(i)` returns (x, y), int64 of shape (batch_size, block_size).

    y is x shifted by one character. With gradient accumulation, i counts micro-batches, not steps.

        ids = 0 1 2 3 4 5 6 7 8 9, block_size 3, batch_size 2, seed 0: four windows per epoch
        batches(0): x = [[1, 2, 3], [7, 8, 0]], y = [[2, 3, 4], [8, 9, _]]    cut after 1, 4 and 7
        batches(1): x = [[4, 5, 6], [0, 0, 0]], y = [[5, 6, 7], [1, _, _]]    _ is IGNORED
        batches(2): the second epoch begins, with other cuts in another order

    Row r of batch i is window i * batch_size + r of an endless sequence of epochs. Each epoch cuts
    a text after its first 1 to `block_size` predictions, at random, and from there on after every
    `block_size`. So the first and the last window may be shorter, and the last one empty.

    An item of a list that fits is one window. A longer one is cut at random too, but into as few
    windows as it needs, none of them empty. Every epoch has `windows_per_epoch` windows.
    """

    def __init__(self, split: Split, block_size: int, batch_size: int, seed: int):
        self._split, self._block_size, self._batch_size = split, block_size, batch_size
        # an array: the hash overflows on purpose, and NumPy warns if a single number does
        self._seed = np.array([seed], dtype=np.uint64)

        # as few windows for each segment as it needs; in a text, a random first cut splits one
        # window in two
        segments = np.array(split.segments, dtype=np.int64)
        self._starts, self._predictions = segments[:, 0], segments[:, 1] - segments[:, 0] - 1
        self._windows_per_segment = -(-self._predictions // block_size)  # ceil division
        if not split.items and self._windows_per_segment[0] > 1:
            self._windows_per_segment += 1

        # number the windows: those of the first segment, then those of the second ...
        self._first_window = np.cumsum(self._windows_per_segment) - self._windows_per_segment
        self.windows_per_epoch = int(self._windows_per_segment.sum())

        # with answers: how many characters up to and including each one are targets
        self._cumulative_targets = None
        if split.targets is not None:
            self._cumulative_targets = np.cumsum(split.targets != IGNORED)

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
        if self._cumulative_targets is None:
            return int(lengths.sum())
        # the first character of a window is only input
        targets = self._cumulative_targets
        return int((targets[starts + lengths] - targets[starts]).sum())

    def epochs(self, batches: int) -> float:
        """Return the number of epochs in this many batches."""
        return batches * self._batch_size / self.windows_per_epoch

    def _windows(self, i: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and the number of predictions of each window of batch i."""
        # in the endless sequence of epochs: the epoch of each row, and its position in that epoch
        first = i * self._batch_size
        sequence = np.arange(first, first + self._batch_size, dtype=np.uint64)[rows]
        epoch, position = np.divmod(sequence, np.uint64(self.windows_per_epoch))  # each (rows,)

        # shuffle, with one key per epoch: row -> window -> segment, and the nth window in it
        key = splitmix(self._seed, epoch)
        window = permute(position, self.windows_per_epoch, key).astype(np.int64)
        segment = np.searchsorted(self._first_window, window, side="right") - 1
        nth = window - self._first_window[segment]

        # draw the first cut of the segment: at most block_size predictions after its start, and so
        # late that the remaining windows can hold the rest
        block_size, predictions = self._block_size, self._predictions[segment]
        remaining_windows = self._windows_per_segment[segment] - 1
        earliest = np.maximum(1, predictions - remaining_windows * block_size)
        # ~key: a second key for the epoch, so that cuts and order are independent
        choices = (block_size + 1 - earliest).astype(np.uint64)
        random = splitmix(~key, segment.astype(np.uint64)) % choices
        first_cut = earliest + random.astype(np.int64)

        # window n lies between the cuts n - 1 and n; the ends of the segment are cuts too
        start = np.clip(first_cut + (nth - 1) * block_size, 0, predictions)
        end = np.clip(first_cut + nth * block_size, 0, predictions)
        return self._starts[segment] + start, end - start


def evaluation_windows(
    split: Split, block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the windows of an evaluation, as batches: x, y, and the segment of each window.

    The windows of a batch have the same length, so no batch has padding, and its shape is at most
    (batch_size, block_size).
    """
    segments, starts, lengths = windows_of(split, block_size)
    # the longest come first: if the first batch fits into memory, all do
    for length in np.unique(lengths)[::-1].tolist():
        same_length = np.flatnonzero(lengths == length)
        for i in range(0, len(same_length), batch_size):
            rows = same_length[i : i + batch_size]
            windows = [split.window(start, length) for start in starts[rows].tolist()]
            x, y = (np.stack(ids).astype(np.int64) for ids in zip(*windows, strict=True))
            yield x, y, segments[rows]


def windows_of(split: Split, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut a split for an evaluation: return segment, start and length of each window.

    Each prediction is in exactly one window. The last window of a segment may be shorter than
    `block_size`. The windows are sorted by length, the longest first.
    """
    # how many windows each segment needs
    segments = np.array(split.segments, dtype=np.int64)
    starts, predictions = segments[:, 0], np.maximum(0, segments[:, 1] - segments[:, 0] - 1)
    counts = -(-predictions // block_size)  # ceil division

    # each window is the nth of its segment, counted from 0
    segment = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(segment)) - (np.cumsum(counts) - counts)[segment]
    lengths = np.minimum(block_size, predictions[segment] - nth * block_size)

    # stable: windows of one length stay in the order of the text
    order = np.argsort(-lengths, kind="stable")
    windows = segment, starts[segment] + nth * block_size, lengths
    return tuple(values[order] for values in windows)


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Shuffle 0..n-1: return the number to which the permutation `key` maps each index (uint64).

        key = splitmix(np.array([2], np.uint64), np.array([0], np.uint64))
        permute(np.arange(5, dtype=np.uint64), 5, key)  # [2, 1, 3, 0, 4]
        permute(np.array([3], np.uint64), 5, key)  # [0]

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

    # permute a cell beyond n again; there are fewer than `rows` of them, so once is mostly enough
    result = row * columns + column
    beyond = result >= n
    if beyond.any():
        result[beyond] = permute(result[beyond], n, np.broadcast_to(key, result.shape)[beyond])
    return result


def splitmix(seed: np.ndarray, i: np.ndarray) -> np.ndarray:
    """Return number i of the SplitMix64 sequence with this seed (uint64 arrays, broadcast).

    Number 0 is the hash of the seed itself. Each number is computed on its own, without the earlier
    ones, and is the same in every version of NumPy. (Steele, Lea and Flood 2014, "Fast Splittable
    Pseudorandom Number Generators".)
    """
    # the state is a counter; two rounds of "shift, xor, multiply" make it look random
    z = seed + i * np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
