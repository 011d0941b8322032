"""Batches: each character once an epoch, in an order that depends on the seed and the step.

tests/test_hornbook.py compares the order with that of hornbook.py, over several epochs.
"""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.batches import IGNORE_INDEX, Batches, Split, evaluation_windows

SPLITS = st.integers(2, 120) | st.lists(st.integers(2, 90), min_size=1, max_size=5)
SIZES = st.integers(1, 20)


def split_of(lengths):
    """Build a split whose id at each position is the position: a text, or items that are apart."""
    if isinstance(lengths, int):
        return Split(np.arange(lengths, dtype=np.uint16))
    ends = np.cumsum(np.array(lengths) + 10)
    ids = np.arange(ends[-1] + 10, dtype=np.uint16)
    return Split(ids, np.stack([ends - lengths, ends], axis=1))


def targets_of(split):
    """Return the position of every character but the first of a document."""
    return [i for start, end in split.documents for i in range(start + 1, end)]


def window_starts(batches, steps):
    """Return the position of the first character of each window of `steps`."""
    return [start for step in steps for start in batches[step][0][:, 0].tolist()]


@settings(max_examples=40, deadline=None)
@given(SPLITS, SIZES, st.integers(0, 9))
@example(17, 16, 0)  # one window
@example(18, 16, 0)  # the last window may be empty
@example([9, 17, 18, 33, 34, 50, 66, 80, 2], 16, 0)  # items of 1 to 5 contexts
def test_epoch_covers_everything(lengths, block_size, seed):
    """Every character but the first of a document is predicted exactly once."""
    split = split_of(lengths)
    batches = Batches(split, block_size, 1, seed)
    n_steps = batches.windows_per_epoch
    for epoch in range(3):
        targets = []
        for step in range(epoch * n_steps, epoch * n_steps + n_steps):
            (x,), (y,) = batches[step]
            assert len(x) == len(y) == block_size
            n = np.count_nonzero(y != IGNORE_INDEX)
            # y is x one character later, and padding comes last
            assert np.array_equal(x[:n], x[0] + np.arange(n)) and np.array_equal(y[:n], x[:n] + 1)
            assert not x[n:].any() and (y[n:] == IGNORE_INDEX).all()
            targets.extend(y[:n].tolist())
        assert sorted(targets) == targets_of(split)
    assert batches.epochs(3 * n_steps) == 3


def test_order_depends_on_seed_and_step():
    """Not on the batch size, nor on what was asked for before."""
    split = split_of([1000, 200])
    expected = window_starts(Batches(split, 16, 6, seed=9), range(40))
    batches = Batches(split, 16, 8, seed=9)
    for step in [29, 0, 3, 3, *reversed(range(30))]:
        assert window_starts(batches, [step]) == expected[8 * step : 8 * step + 8]
    assert window_starts(Batches(split, 16, 8, seed=8), [0]) != expected[:8]


# --------------------------------------------------------------------------------------- evaluation


@settings(max_examples=40, deadline=None)
@given(SPLITS, SIZES, SIZES)
def test_evaluation_covers_everything(lengths, block_size, batch_size):
    """The longest windows come first."""
    split, targets, longest = split_of(lengths), [], block_size
    for x, y, documents in evaluation_windows(split, block_size, batch_size):
        assert x.shape[0] <= batch_size and x.shape[1] <= longest
        longest = x.shape[1]
        assert np.array_equal(y, x + 1)
        assert np.array_equal(x, x[:, :1] + np.arange(x.shape[1]))
        for row, document in zip(y, documents, strict=True):
            start, end = split.documents[document]
            assert start < row[0] and row[-1] < end
        targets.append(y.ravel())
    assert np.sort(np.concatenate(targets)).tolist() == targets_of(split)


@settings(deadline=None)
@given(SPLITS, SIZES, st.integers(1, 130))
@example(48, 4, 46)  # almost all: no window overlaps another
def test_sample_predicts_nothing_twice(lengths, block_size, limit):
    """And of a text at most as many characters as asked."""
    split = split_of(lengths)
    chosen, total = split.evenly_spaced(limit, block_size), len(targets_of(split))
    if total <= limit:
        assert chosen is split
        return
    predicted = targets_of(chosen)
    assert len(predicted) <= limit or len(chosen.documents) == 1 or isinstance(lengths, list)
    assert 0 < len(set(predicted)) == len(predicted) and set(predicted) <= set(targets_of(split))
