"""Training batches as a pure function of (seed, step), and the windows of an evaluation.

An epoch cuts the text into windows of `block_size` predictions, starting at a random offset, and
visits each window once, in random order. The order is a permutation that is computed for the
indices of one batch at a time. So shuffling a text of any size takes no memory, and a run that is
resumed, or runs on several processes, sees the same batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt

import numpy as np

from data.disk_cache import StoredIds

ROUNDS = 3  # of the Feistel network in `permute`
IGNORED = -100  # the target of padding; cross_entropy ignores it by default


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the validation part of a corpus.

    `ids` is a whole text, possibly shared by both splits and possibly in a file. `segments` are the
    (start, end) of this split in it, one per file; no window crosses the end of a segment.
    """

    ids: np.ndarray | StoredIds
    segments: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(end - start for start, end in self.segments)

    def head(self, predictions: int) -> "Split":
        """Return the beginning of this split with this many predictions, at least one."""
        segments, left = [], max(1, predictions)
        for start, end in self.segments:
            end = min(end, start + left + 1) if left else start
            segments.append((start, end))
            left -= max(0, end - start - 1)
        return Split(self.ids, tuple(segments))


class Batches:
    """`batches(step)` returns (x, y), int64 of shape (batch_size, block_size), y shifted by one.

        ids = 0 1 2 3 4 5 6 7 8 9, block_size 3, batch_size 2, seed 0: two windows per epoch
        batches(0): x = [[3, 4, 5], [6, 7, 8]], y = [[4, 5, 6], [7, 8, 9]]    starting at offset 3
        batches(1): x = [[3, 4, 5], [0, 1, 2]], y = [[4, 5, 6], [1, 2, 3]]    at offset 0, shuffled

    Row i of step s is window number s * batch_size + i of an endless sequence of epochs. A segment
    (file) of L > block_size characters has max(1, L // block_size - 1) windows per epoch, so that
    they can start at a random one of up to 2 * block_size - 1 offsets. A shorter segment is one
    window, padded with targets IGNORED; one of a single character has nothing to predict. So all
    epochs have the same number of windows, `windows_per_epoch`, and what one epoch omits at the
    ends can be visited in others.
    """

    def __init__(self, split: Split, block_size: int, batch_size: int, seed: int):
        segments = [(start, end) for start, end in split.segments if end - start > 1]
        assert segments, "the split has no window; check_sizes should have refused it"
        self._starts, ends = np.array(segments, dtype=np.int64).T
        lengths = ends - self._starts
        counts = np.maximum(1, lengths // block_size - 1)  # windows of each segment
        self._predictions = np.minimum(lengths - 1, block_size)  # of each of these windows
        self._offsets = (lengths - counts * self._predictions).astype(
            np.uint64
        )  # number of possible offsets
        self._first_window = np.cumsum(counts) - counts  # number of each segment's first window
        self._ids = split.ids
        self.windows_per_epoch = int(counts.sum())
        self.predictions_per_epoch = int((counts * self._predictions).sum())
        self._characters = int(lengths.sum())
        self._block_size, self._batch_size = block_size, batch_size
        self._seed = np.array([seed], dtype=np.uint64)

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Return the (x, y) of a step, or only some rows: those that one process trains on."""
        starts, lengths = self._windows(step, rows)
        x = np.zeros((len(starts), self._block_size), dtype=np.int64)
        y = np.full_like(x, IGNORED)
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            text = self._ids[start : start + length + 1]
            x[row, :length], y[row, :length] = text[:-1], text[1:]
        return x, y

    def predictions(self, step: int) -> int:
        """Return the number of predictions in the batch of a step: its targets without padding."""
        return int(self._windows(step, slice(None))[1].sum())

    def epochs(self, steps: int) -> float:
        """Return how often, on average, `steps` batches read each character that windows cover."""
        windows = steps * self._batch_size
        predictions = windows * (self.predictions_per_epoch / self.windows_per_epoch)
        return predictions / self._characters

    def _windows(self, step: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts and the numbers of predictions of a step's windows."""
        first = step * self._batch_size
        numbers = np.arange(first, first + self._batch_size, dtype=np.uint64)[rows]
        epoch, index = np.divmod(numbers, np.uint64(self.windows_per_epoch))
        key = splitmix(self._seed, epoch)
        window = permute(index, self.windows_per_epoch, key).astype(np.int64)
        segment = np.searchsorted(self._first_window, window, side="right") - 1
        offset = splitmix(~key, segment.astype(np.uint64)) % self._offsets[segment]
        start = self._starts[segment] + (window - self._first_window[segment]) * self._block_size
        return start + offset.astype(np.int64), self._predictions[segment]


def evaluation_windows(
    split: Split, block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every prediction of a split exactly once: (x, y), int64, at most (batch, block_size).

    Windows do not overlap and start anew in every segment, whose last window may be shorter.
    Windows of one length share batches, longest first. A segment of n characters has n - 1
    predictions.
    """
    segments = np.array(split.segments, dtype=np.int64)
    starts, predictions = segments[:, 0], np.maximum(0, segments[:, 1] - segments[:, 0] - 1)
    full, rest = np.divmod(predictions, block_size)
    end = np.cumsum(full)  # full windows up to and including each segment

    def full_window_starts(numbers: np.ndarray) -> np.ndarray:
        segment = np.searchsorted(end, numbers, side="right")
        return starts[segment] + (numbers - end[segment] + full[segment]) * block_size

    def batched(length: int, count: int, starts_of: Callable[[np.ndarray], np.ndarray]):
        for i in range(0, count, batch_size):
            first = starts_of(np.arange(i, min(i + batch_size, count))).tolist()
            yield _shifted(np.stack([split.ids[start : start + length + 1] for start in first]))

    if end[-1]:
        yield from batched(block_size, int(end[-1]), full_window_starts)
    for length in sorted(set(rest.tolist()) - {0}, reverse=True):
        last_window_starts = (starts + predictions - rest)[rest == length]
        yield from batched(length, len(last_window_starts), last_window_starts.__getitem__)


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Permute 0..n-1: return where the permutation `key` maps each index (uint64 arrays).

        key = splitmix([2], [0])
        permute([0, 1, 2, 3, 4], 5, key) -> [2, 1, 3, 0, 4]
        permute([3], 5, key) -> [0]

    A Feistel network on a grid of about sqrt(n) x sqrt(n) cells: row and column are shifted
    alternately, each by a hash of the other. A result of n or more is permuted again until it is
    below n (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). Every step is
    invertible, so no two indices collide.
    """
    rows = np.uint64(isqrt(n - 1) + 1)
    columns = np.uint64(-(-n // int(rows)))
    row, column = np.divmod(index, columns)
    for i in range(ROUNDS):
        row = (row + splitmix(key + np.uint64(2 * i), column)) % rows
        column = (column + splitmix(key + np.uint64(2 * i + 1), row)) % columns
    result = row * columns + column
    beyond = result >= n
    if beyond.any():
        result[beyond] = permute(result[beyond], n, np.broadcast_to(key, result.shape)[beyond])
    return result


def splitmix(seed: np.ndarray, i: np.ndarray) -> np.ndarray:
    """Return number `i` of the SplitMix64 sequence with this seed (uint64 arrays that broadcast).

    (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators".) Any number can
    be computed without the ones before it, and is the same in every version of NumPy.
    """
    z = seed + i * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _shifted(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split (B, T + 1) ids into x and y, both (B, T), int64 and contiguous."""
    return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
