"""Training batches as a pure function of (seed, batch number), and the windows of an evaluation.

    text     the characters of a split, as ids
    segment  a part of it that no window crosses: an item of a list, or else the whole text
    window   up to `block_size` consecutive predictions in a segment: a row of a batch
    batch    `batch_size` windows; the shorter ones are padded

An epoch is a shuffled list of windows that predicts every character of a text but the first once,
and every character of a list. Its order and its cuts come from the seed and the number of the
epoch, so a resumed run, or one with several processes, sees the same batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

IGNORED = -100  # the target of characters that do not count; cross_entropy ignores it by default


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the validation part of a corpus.

    ids       those of the characters
    segments  the (start, end) of each segment; by default a single one, the whole text
    is_list   whether the segments are the items of a list
    targets   None if all characters are targets; otherwise a copy of ids with IGNORED where the
              loss skips one

    The segment of an item begins with the last character of the separator before it: the input
    that predicts the item's first character.
    """

    ids: np.ndarray
    segments: tuple[tuple[int, int], ...] = ()
    is_list: bool = False
    targets: np.ndarray | None = None

    def __post_init__(self):
        if not self.segments:
            object.__setattr__(self, "segments", ((0, len(self.ids)),))

    def __len__(self) -> int:
        return len(self.ids)

    def window(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the targets of the window of `length` predictions at `start`."""
        # one character more than predictions: the last one is only predicted
        text = self.ids[start : start + length + 1]
        if self.targets is None:
            return text[:-1], text[1:]
        return text[:-1], self.targets[start + 1 : start + length + 1]

    def evenly_spaced(self, predictions: int, block_size: int) -> "Split":
        """Return a split of about `predictions` predictions: evenly spaced windows, at least one.

        The split of a list has whole items instead of windows.
        """
        total = sum(end - start - 1 for start, end in self.segments)
        if self.is_list:
            # as if all items had the average length
            count = max(1, round(len(self.segments) * predictions / total))
            chosen = np.linspace(0, len(self.segments) - 1, count).astype(int)
            segments = tuple(self.segments[i] for i in chosen)
        else:
            # the first window at the beginning of the text, the last at its end
            length = min(block_size, total)
            count = max(1, min(predictions, total) // length)  # so few that none overlap
            starts = np.linspace(0, total - length, count).astype(int).tolist()
            segments = tuple((start, start + length + 1) for start in starts)
        return replace(self, segments=segments)

    def at_most(self, predictions: int, block_size: int) -> "Split":
        """Return this split, or evenly spaced windows of it if it has more predictions."""
        if sum(end - start - 1 for start, end in self.segments) <= predictions:
            return self
        chosen = self.evenly_spaced(predictions, block_size).segments
        # `evenly_spaced` may return a few more: leave out the last windows
        ends = np.cumsum([end - start - 1 for start, end in chosen])
        count = max(1, np.searchsorted(ends, predictions, side="right"))
        return replace(self, segments=chosen[:count])


class Batches:
    """The batches of a run: `batches[i]` is (x, y), int64 of shape (batch_size, block_size).

    y is x shifted by one character. With gradient accumulation, i counts micro-batches, not steps.

        ids = 0 1 2 3 4 5 6 7 8 9, block_size 3, batch_size 2, seed 0: four windows per epoch
        batches[0]: x = [[7, 8, 0], [0, 0, 0]], y = [[8, 9, _], [1, _, _]]    cut after 1, 4 and 7
        batches[1]: x = [[4, 5, 6], [1, 2, 3]], y = [[5, 6, 7], [2, 3, 4]]    _ is IGNORED
        batches[2]: the second epoch begins, with other cuts in another order

    Row r of batch i is window i * batch_size + r of an endless sequence of epochs. Each epoch cuts
    a text after its first 1 to `block_size` predictions, at random, and from there on after every
    `block_size`. So the first and the last window may be shorter, and the last one empty.

    An item of a list that fits is one window. A longer one is cut at random too, but into as few
    windows as it needs, none of them empty. Every epoch has `windows_per_epoch` windows.
    """

    def __init__(self, split: Split, block_size: int, batch_size: int, seed: int):
        self._split, self._block_size, self._batch_size = split, block_size, batch_size
        self._seed = seed

        segments = np.array(split.segments, dtype=np.int64)
        self._starts, self._predictions = segments[:, 0], segments[:, 1] - segments[:, 0] - 1
        self._counts = -(-self._predictions // block_size)  # windows per segment; ceil division
        if not split.is_list:
            self._counts[self._counts > 1] += 1  # the random first cut splits one in two
        self.windows_per_epoch = int(self._counts.sum())

        # a batch may begin in one epoch and end in the next
        self._epoch = lru_cache(maxsize=2)(self._cut_and_shuffle)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of batch i."""
        # where a window is shorter, x is padded with id 0, and no target counts
        x = np.zeros((self._batch_size, self._block_size), dtype=np.int64)
        y = np.full_like(x, IGNORED)
        for row in range(self._batch_size):
            epoch, place = divmod(i * self._batch_size + row, self.windows_per_epoch)
            start, end = self._epoch(epoch)[place].tolist()
            length = end - start
            x[row, :length], y[row, :length] = self._split.window(start, length)
        return x, y

    def epochs(self, batches: int) -> float:
        """Return the number of epochs in this many batches."""
        return batches * self._batch_size / self.windows_per_epoch

    def _cut_and_shuffle(self, epoch: int) -> np.ndarray:
        """Return the (start, end) of the windows of an epoch, in random order.

        A window predicts the characters after start, up to and including the one at end.
        """
        # RandomState, because its numbers are the same in every version of NumPy
        rng = np.random.RandomState((self._seed, epoch))

        # the first cut of a segment: so late that its other windows can hold the rest
        earliest = np.maximum(1, self._predictions - (self._counts - 1) * self._block_size)
        n_choices = self._block_size + 1 - earliest
        first_cut = earliest + (rng.random_sample(len(earliest)) * n_choices).astype(np.int64)

        # window n lies between the cuts n - 1 and n; the ends of the segment are cuts too
        segment, n = segment_of_each_window(self._counts)
        end = first_cut[segment] + n * self._block_size
        cuts = np.stack([end - self._block_size, end], axis=1)  # (windows, 2)
        cuts = np.clip(cuts, 0, self._predictions[segment, None]) + self._starts[segment, None]
        return cuts[rng.permutation(self.windows_per_epoch)]


def evaluation_windows(
    split: Split, block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the windows of an evaluation, as batches: x, y, and the segment of each window.

    Each prediction is in exactly one window. x and y are int64, of shape (B, T), where B is at most
    `batch_size`, and T at most `block_size`. The windows of a batch have the same length, so there
    is no padding. The longest come first: if the first batch fits into memory, all do.
    """
    segments = np.array(split.segments, dtype=np.int64)
    segment_starts, predictions = segments[:, 0], segments[:, 1] - segments[:, 0] - 1
    segment, n = segment_of_each_window(-(-predictions // block_size))  # ceil division
    starts = segment_starts[segment] + n * block_size
    lengths = np.minimum(block_size, predictions[segment] - n * block_size)

    for length in np.unique(lengths)[::-1].tolist():
        same_length = np.flatnonzero(lengths == length)
        for i in range(0, len(same_length), batch_size):
            rows = same_length[i : i + batch_size]
            windows = [split.window(start, length) for start in starts[rows].tolist()]
            x, y = (np.stack(ids).astype(np.int64) for ids in zip(*windows, strict=True))
            yield x, y, segment[rows]


def segment_of_each_window(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the segment of each window, and its number in that segment, counted from 0.

    segment_of_each_window(np.array([2, 1, 3]))  # [0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2]
    """
    segment = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return segment, np.arange(len(segment)) - first[segment]
