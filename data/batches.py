"""Ids -> windows: training batches as a pure function of (seed, batch number), and evaluations.

    split     the training or the validation text, as ids
    document  a part of it that no window crosses: an item of a list, or else the whole text
    window    up to `block_size` consecutive predictions in a document: a row of a batch
    batch     `batch_size` windows; the shorter ones are padded

An epoch is a shuffled list of windows that predicts every character of a text but the first once,
and every character of a list. Its order and its cuts come from the seed and the number of the
epoch, so a resumed run, or one with several processes, sees the same batches.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

IGNORE_INDEX = -100  # the target of what does not count; cross_entropy ignores it by default


class Split:
    """The training or the validation part of a corpus.

    ids        those of the characters
    documents  the (start, end) of each document: (D, 2); by default a single one, the whole text
    targets    by default ids; otherwise a copy with IGNORE_INDEX where the loss skips a character

    The document of an item begins with the last character of the separator before it: the input
    that predicts the item's first character.
    """

    def __init__(self, ids: np.ndarray, documents=None, targets: np.ndarray | None = None):
        self.ids = ids
        self.documents = np.array([(0, len(ids))] if documents is None else documents)
        self.targets = ids if targets is None else targets

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """The number of predictions in each document: all its characters but the first."""
        return self.documents[:, 1] - self.documents[:, 0] - 1

    def evenly_spaced(self, n_predictions: int, block_size: int) -> "Split":
        """Return about `n_predictions` of this split's predictions, or itself if it has no more.

        They are evenly spaced windows of a text, or whole items of a list.
        """
        count, total = len(self.documents), int(self.lengths.sum())
        if total <= n_predictions:
            return self
        if count > 1:  # as if all items had the average length
            chosen = np.linspace(0, count - 1, max(1, round(count * n_predictions / total)))
            documents = self.documents[chosen.astype(int)]
        else:  # from the beginning of the text to its end, so few windows that none overlap
            length = min(block_size, total)
            starts = np.linspace(0, total - length, max(1, n_predictions // length)).astype(int)
            documents = self.documents[0, 0] + np.stack([starts, starts + length + 1], axis=1)
        return Split(self.ids, documents, self.targets)


class Batches:
    """The batches of a run: `batches[i]` is (x, y), int64 of shape (batch_size, block_size).

    y is x shifted by one character. With gradient accumulation, i counts micro-batches, not steps.

        ids = 0 1 2 3 4 5 6 7 8 9, block_size 3, batch_size 2, seed 0: four windows per epoch
        batches[0]: x = [[7, 8, 0], [0, 0, 0]], y = [[8, 9, _], [1, _, _]]    cut after 1, 4 and 7
        batches[1]: x = [[4, 5, 6], [1, 2, 3]], y = [[5, 6, 7], [2, 3, 4]]    _ is IGNORE_INDEX
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
        self._counts = -(-split.lengths // block_size)  # windows per document; ceil division
        if len(self._counts) == 1:  # the random first cut of a text splits one window in two
            self._counts += self._counts > 1
        self.windows_per_epoch = int(self._counts.sum())
        # a batch may begin in one epoch and end in the next
        self._epoch = lru_cache(maxsize=2)(self._cut_and_shuffle)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of batch i."""
        # where a window is shorter, x is padded with id 0, and no target counts
        x = np.zeros((self._batch_size, self._block_size), dtype=np.int64)
        y = np.full_like(x, IGNORE_INDEX)
        for row in range(self._batch_size):
            epoch, place = divmod(i * self._batch_size + row, self.windows_per_epoch)
            start, end = self._epoch(epoch)[place]
            x[row, : end - start] = self._split.ids[start:end]
            y[row, : end - start] = self._split.targets[start + 1 : end + 1]
        return x, y

    def epochs(self, batches: int) -> float:
        """Return the number of epochs in this many batches."""
        return batches * self._batch_size / self.windows_per_epoch

    def _cut_and_shuffle(self, epoch: int) -> np.ndarray:
        """Return the (start, end) of the windows of an epoch, in random order."""
        # RandomState, because its numbers are the same in every version of NumPy
        rng = np.random.RandomState((self._seed, epoch))
        # draw the first cut of each document at random, but late enough that the remaining windows
        # can hold the rest
        earliest = np.maximum(1, self._split.lengths - (self._counts - 1) * self._block_size)
        n_choices = self._block_size + 1 - earliest
        first_cuts = earliest + (rng.random_sample(len(earliest)) * n_choices).astype(np.int64)
        _, windows = window_spans(self._split, first_cuts, self._counts, self._block_size)
        return windows[rng.permutation(self.windows_per_epoch)]


def evaluation_windows(
    split: Split, block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the windows of an evaluation, as batches: x, y, and the document of each window.

    Each prediction is in exactly one window. x and y are int64, of shape (B, T), where B is at most
    `batch_size`, and T at most `block_size`. The windows of a batch have the same length, so there
    is no padding. The longest come first: if the first batch fits into memory, all do.
    """
    counts = -(-split.lengths // block_size)
    document, windows = window_spans(split, np.full_like(counts, block_size), counts, block_size)
    lengths = windows[:, 1] - windows[:, 0]
    for length in np.unique(lengths)[::-1]:
        same_length = np.flatnonzero(lengths == length)
        for i in range(0, len(same_length), batch_size):
            rows = same_length[i : i + batch_size]
            place = windows[rows, :1] + np.arange(length)  # (B, T)
            x, y = split.ids[place], split.targets[place + 1]
            yield x.astype(np.int64), y.astype(np.int64), document[rows]


def window_spans(
    split: Split, first_cuts: np.ndarray, counts: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut each document into `counts` windows: after its first cut, then after every `block_size`.

    Returns the document of each window, and its (start, end): it predicts the characters after
    start, up to and including the one at end.
    """
    document = np.repeat(np.arange(len(counts)), counts)
    n = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    # window n lies between the cuts n - 1 and n; the ends of the document are cuts too
    end = first_cuts[document] + n * block_size
    cuts = np.stack([end - block_size, end], axis=1)  # (windows, 2)
    cuts = np.clip(cuts, 0, split.lengths[document, None])
    return document, cuts + split.documents[document, :1]
