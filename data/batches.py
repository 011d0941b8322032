"""Which characters a step learns from: a pure function of (seed, step), computed on the fly and
never stored.

An epoch cuts the text into windows of `block_size` predictions, beginning at a random offset, and
visits each window once, in a random order. The order is a permutation that is evaluated for the
indices of one batch at a time, so shuffling a text of any size takes no memory, and a run that is
resumed, or spread over ranks, sees the same batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Split:
    """The part of a corpus to train on, or to validate on.

    `ids` is a whole text, perhaps shared by both splits and perhaps memory-mapped; `segments` are
    the (start, end) in it that belong to this split, one for each file. No window crosses the end
    of a segment.
    """

    ids: np.ndarray
    segments: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(end - start for start, end in self.segments)

    def head(self, predictions: int) -> "Split":
        """The beginning of this split with so many predictions, at least one: a fixed text to
        measure a loss on.
        """
        segments, left = [], max(1, predictions)
        for start, end in self.segments:
            end = min(end, start + left + 1) if left else start
            segments.append((start, end))
            left -= max(0, end - start - 1)
        return Split(self.ids, tuple(segments))


class Batches:
    """`batches(step)` gives that step's (x, y), int64 of shape (batch_size, block_size), y one
    character later.

    Row i of step s is the window at position p = s * batch_size + i of an endless sequence of
    epochs. A segment (file) of L > block_size characters gives max(1, L // block_size - 1) windows,
    which leaves room to begin them at a random one of up to 2 * block_size - 1 offsets; a shorter
    segment gives none. So every epoch has the same number of windows, `windows_per_epoch`, and what
    one epoch leaves out at the ends another visits.
    """

    def __init__(self, split: Split, block_size: int, batch_size: int, seed: int):
        segments = np.array([s for s in split.segments if s[1] - s[0] > block_size], dtype=np.int64)
        assert len(segments), "check_sizes refuses a split without a window"
        lengths = segments[:, 1] - segments[:, 0]
        counts = np.maximum(1, lengths // block_size - 1)
        self._starts = segments[:, 0]
        self._offsets = (lengths - counts * block_size).astype(
            np.uint64
        )  # how many a segment allows
        self._first = np.cumsum(counts) - counts  # the number of each segment's first window
        self._windows = sliding_window_view(split.ids, block_size + 1)
        self.windows_per_epoch = int(counts.sum())
        self._block_size, self._batch_size = block_size, batch_size
        self._seed = np.array([seed], dtype=np.uint64)

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """The (x, y) of `step`, or only its `rows`: a rank's slice of the one batch."""
        first = step * self._batch_size
        position = np.arange(first, first + self._batch_size, dtype=np.uint64)[rows]
        epoch, index = np.divmod(position, np.uint64(self.windows_per_epoch))
        key = splitmix(self._seed, epoch)
        window = permute(index, self.windows_per_epoch, key).astype(np.int64)
        segment = np.searchsorted(self._first, window, side="right") - 1
        offset = splitmix(~key, segment.astype(np.uint64)) % self._offsets[segment]
        start = self._starts[segment] + (window - self._first[segment]) * self._block_size
        return _shifted(self._windows[start + offset.astype(np.int64)])


def evaluation_windows(
    split: Split, block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every prediction of `split` exactly once: (x, y), int64 of shape (at most batch_size, at most
    block_size).

    Windows do not overlap and begin anew in every segment, whose last window may be shorter;
    windows of one length share batches, longest first. A segment of n characters gives n - 1
    predictions.
    """
    segments = np.array(split.segments, dtype=np.int64)
    starts, predictions = segments[:, 0], np.maximum(0, segments[:, 1] - segments[:, 0] - 1)
    full, rest = np.divmod(predictions, block_size)
    end = np.cumsum(full)  # the number after each segment's last full window

    def full_windows(numbers: np.ndarray) -> np.ndarray:
        segment = np.searchsorted(end, numbers, side="right")
        return starts[segment] + (numbers - end[segment] + full[segment]) * block_size

    def batched(length: int, count: int, places: Callable[[np.ndarray], np.ndarray]):
        windows = sliding_window_view(split.ids, length + 1)
        for i in range(0, count, batch_size):
            yield _shifted(windows[places(np.arange(i, min(i + batch_size, count)))])

    if end[-1]:
        yield from batched(block_size, int(end[-1]), full_windows)
    for length in sorted(set(rest.tolist()) - {0}, reverse=True):
        last = (starts + predictions - rest)[rest == length]
        yield from batched(length, len(last), last.__getitem__)


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where the permutation of 0..n-1 that `key` chooses sends each `index` (uint64, as `key`,
    which broadcasts).

    A Feistel network on a grid of about sqrt(n) by sqrt(n) cells, in which row and column are
    shifted in turn, each by a hash of the other; a result beyond n goes through again until it
    falls below (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Every step can
    be undone, so no two indices meet.
    """
    rows = np.uint64(isqrt(n - 1) + 1)
    columns = np.uint64(-(-n // int(rows)))
    row, column = np.divmod(index, columns)
    for round in range(_ROUNDS):
        row = (row + splitmix(key + np.uint64(2 * round), column)) % rows
        column = (column + splitmix(key + np.uint64(2 * round + 1), row)) % columns
    result = row * columns + column
    beyond = result >= n
    if beyond.any():
        result[beyond] = permute(result[beyond], n, np.broadcast_to(key, result.shape)[beyond])
    return result


def splitmix(seed: np.ndarray, i: np.ndarray) -> np.ndarray:
    """Number `i` of the SplitMix64 sequence that begins at `seed` (uint64 arrays that broadcast).

    (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.) Any number of
    the sequence can be had without the ones before it, and the bits are the same in every version
    of numpy.
    """
    z = seed + i * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _shifted(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(B, T + 1) ids -> x and y, both (B, T) int64 and contiguous."""
    return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
