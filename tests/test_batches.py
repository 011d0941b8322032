"""Batches: every window once per epoch, in an order that depends only on the seed and the step."""

import numpy as np
import pytest

from data.batches import IGNORED, Batches, Split, evaluation_windows, permute, splitmix

SHAPES = [  # segment lengths, block_size, batch_size
    ([1000], 16, 4),
    ([1000], 16, 100),  # a batch larger than an epoch
    ([17], 16, 3),  # one window, and no room for an offset
    ([33], 16, 2),
    ([500, 3, 17, 16, 100, 0, 64], 16, 5),  # some too short for a window
    ([40, 40], 1, 7),
]


def split_of(lengths):
    """Build a split whose id at each position is the position, with gaps between its segments."""
    segments, start = [], 5
    for length in lengths:
        segments.append((start, start + length))
        start += length + 10
    return Split(np.arange(start, dtype=np.uint16), tuple(segments))


def targets_of(split):
    """Return the position of every character but the first of a segment."""
    return [i for start, end in split.segments for i in range(start + 1, end)]


def window_starts(batches, steps):
    """Return the position of the first character of each window of `steps`."""
    return np.concatenate([batches(step)[0][:, 0] for step in steps])


def epochs(batches, batch_size, count):
    """Return the starts of the windows of the first `count` epochs, one row per epoch."""
    windows = batches.windows_per_epoch * count
    starts = window_starts(batches, range(-(-windows // batch_size)))
    return starts[:windows].reshape(count, -1)


# The permutation


@pytest.mark.parametrize("sizes", [range(1, 2001), [10**6, 2**20, 10**6 + 3]])
def test_permute_is_a_permutation(sizes):
    for n in sizes:
        key = splitmix(np.array([n], np.uint64), np.array([0], np.uint64))
        image = permute(np.arange(n, dtype=np.uint64), n, key)
        assert np.array_equal(np.sort(image), np.arange(n)), n


# Training batches


@pytest.mark.parametrize(("lengths", "block_size", "batch_size"), SHAPES)
def test_y_is_x_one_character_later(lengths, block_size, batch_size):
    batches = Batches(split_of(lengths), block_size, batch_size, seed=1)
    for step in range(20):
        x, y = batches(step)
        assert x.shape == y.shape == (batch_size, block_size)
        assert x.dtype == y.dtype == np.int64
        assert x.flags.c_contiguous and y.flags.c_contiguous
        for row in range(batch_size):
            n = np.count_nonzero(y[row] != IGNORED)
            assert np.array_equal(x[row, :n], x[row, 0] + np.arange(n))
            assert np.array_equal(y[row, :n], x[row, :n] + 1)
            assert not x[row, n:].any() and (y[row, n:] == IGNORED).all()


@pytest.mark.parametrize(("lengths", "block_size", "batch_size"), SHAPES)
def test_every_epoch_visits_every_window_once(lengths, block_size, batch_size):
    split = split_of(lengths)
    batches = Batches(split, block_size, batch_size, seed=3)
    expected = [max(1, n // block_size - 1) for n in lengths if n > 1]
    assert batches.windows_per_epoch == sum(expected)
    for starts in epochs(batches, batch_size, 30):
        found = []
        for start, end in split.segments:
            inside = np.sort(starts[(start <= starts) & (starts < end)])
            assert (np.diff(inside) == block_size).all()  # no repeats, no gaps
            found.append(len(inside))
        assert [count for count in found if count] == expected


def test_epochs_differ_in_order_and_offset():
    order, offsets = set(), set()
    for starts in epochs(Batches(split_of([1000]), 16, 4, seed=4), 4, 200):
        order.add(tuple(np.argsort(starts)))
        offsets.add(int(starts.min()) - 5)
    assert len(order) == 200
    assert offsets == set(range(1000 - 61 * 16))


def test_the_offsets_of_two_files_in_an_epoch_are_independent():
    split = split_of([100, 100])
    starts = np.sort(epochs(Batches(split, 16, 5, seed=5), 5, 500), axis=1)
    first, second = starts[:, 0] - split.segments[0][0], starts[:, 5] - split.segments[1][0]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


@pytest.mark.parametrize(("lengths", "block_size", "batch_size"), SHAPES)
def test_no_window_crosses_the_end_of_a_file_and_in_some_epoch_each_character_is_a_target(
    lengths, block_size, batch_size
):
    split = split_of(lengths)
    batches = Batches(split, block_size, batch_size, seed=6)
    targets = np.unique(np.concatenate([batches(step)[1].ravel() for step in range(3000)]))
    assert targets[targets != IGNORED].tolist() == targets_of(split)


def test_a_file_of_at_most_block_size_characters_is_one_shorter_window_of_an_epoch():
    split = split_of([40, 16, 2, 1, 0])
    batches = Batches(split, 16, 3, seed=1)  # an epoch: one window each of 16, 15 and 1 predictions
    assert batches.windows_per_epoch == 3 and batches.predictions_per_epoch == 32
    for epoch in range(20):
        x, y = batches(epoch)
        (short,) = np.flatnonzero(x[:, 0] == split.segments[1][0])
        assert y[short].tolist() == [*range(*split.segments[1]), IGNORED][1:]
        (tiny,) = np.flatnonzero(x[:, 0] == split.segments[2][0])
        assert y[tiny].tolist() == [split.segments[2][1] - 1, *[IGNORED] * 15]


@pytest.mark.parametrize(("lengths", "block_size", "batch_size"), SHAPES)
def test_predictions_and_epochs_count_what_is_read(lengths, block_size, batch_size):
    batches = Batches(split_of(lengths), block_size, batch_size, seed=6)
    read = 0
    for step in range(4 * batches.windows_per_epoch):  # whole epochs
        count = np.count_nonzero(batches(step)[1] != IGNORED)
        assert batches.predictions(step) == count
        read += count
    predictable = sum(length - 1 for length in lengths if length)
    assert batches.epochs(step + 1) == pytest.approx(read / predictable, rel=1e-12)


def test_a_batch_depends_only_on_the_seed_and_the_step():
    split = split_of([1000, 200])
    in_order = Batches(split, 16, 8, seed=7)
    expected = [in_order(step) for step in range(50)]
    shuffled = Batches(split, 16, 8, seed=7)
    for step in [49, 0, 3, 3, *reversed(range(50))]:
        assert np.array_equal(shuffled(step), expected[step])
    assert not np.array_equal(Batches(split, 16, 8, seed=8)(0), expected[0])


def test_the_batch_order_never_changes():
    # A run saved by an earlier version must resume with the same batches.
    batches = Batches(split_of([1000, 200]), 16, 8, seed=1337)
    assert batches(0)[0][:, 0].tolist() == [684, 1047, 844, 412, 700, 972, 812, 796]
    assert batches(10**6)[0][:, 0].tolist() == [1061, 231, 407, 455, 631, 71, 615, 1093]


def test_batch_size_only_changes_the_grouping_of_the_windows():
    split = split_of([1000, 200])
    assert np.array_equal(
        window_starts(Batches(split, 16, 6, seed=9), range(40)),
        window_starts(Batches(split, 16, 8, seed=9), range(30)),
    )


# Evaluation


@pytest.mark.parametrize(("lengths", "block_size", "batch_size"), SHAPES)
def test_evaluation_predicts_every_character_but_the_first_of_a_file_once(
    lengths, block_size, batch_size
):
    split = split_of(lengths)
    targets = []
    for x, y in evaluation_windows(split, block_size, batch_size):
        assert x.shape == y.shape and x.shape[0] <= batch_size and x.shape[1] <= block_size
        assert x.dtype == y.dtype == np.int64
        assert np.array_equal(y, x + 1)
        assert np.array_equal(x, x[:, :1] + np.arange(x.shape[1]))
        targets.append(y.ravel())
    assert np.sort(np.concatenate(targets)).tolist() == targets_of(split)


def test_evaluation_windows_follow_one_another_from_the_beginning_of_a_file_the_longest_first():
    batches = evaluation_windows(split_of([40, 35]), block_size=16, batch_size=3)
    windows = [(x[:, 0].tolist(), x.shape[1]) for x, _ in batches]
    assert windows == [([5, 21, 55], 16), ([71], 16), ([37], 7), ([87], 2)]


@pytest.mark.parametrize("lengths", [[40, 0, 35], [0, 1, 1, 2, 35], [2]])
def test_head_is_the_beginning_of_a_split_with_at_least_one_target(lengths):
    split = split_of(lengths)
    everything = targets_of(split)
    for wanted in (0, 1, 2, 38, 39, 40, 72, 73, 1000):
        head = split.head(wanted)
        assert targets_of(head) == everything[: max(1, wanted)]
        assert len(head) <= len(split) and head.ids is split.ids


# Examples in docstrings


def test_the_examples_in_the_docstrings_are_correct():
    key = splitmix(np.array([2], np.uint64), np.array([0], np.uint64))
    assert permute(np.arange(5, dtype=np.uint64), 5, key).tolist() == [2, 1, 3, 0, 4]
    assert permute(np.array([3], np.uint64), 5, key).tolist() == [0]
    batches = Batches(Split(np.arange(10, dtype=np.uint8), ((0, 10),)), 3, 2, seed=0)
    for step, x, y in (
        (0, [[3, 4, 5], [6, 7, 8]], [[4, 5, 6], [7, 8, 9]]),
        (1, [[3, 4, 5], [0, 1, 2]], [[4, 5, 6], [1, 2, 3]]),
    ):
        assert [each.tolist() for each in batches(step)] == [x, y]
        for part in (x, y):
            assert str(part) in Batches.__doc__
    assert "[2, 1, 3, 0, 4]" in permute.__doc__ and "[3], 5, key) -> [0]" in permute.__doc__
