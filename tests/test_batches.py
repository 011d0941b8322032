"""Batches: every window once per epoch, in an order that depends only on the seed and the step."""

import numpy as np
import pytest

from data.batches import IGNORED, Batches, Split, evaluation_windows, permute, splitmix

SHAPES = [  # lengths of the items, or of a text alone; block_size, batch_size
    (1000, 16, 4),
    (1000, 16, 100),  # a batch larger than an epoch
    (17, 16, 3),  # one window
    (18, 16, 1),  # the last window may be empty
    (40, 1, 7),
    ([9, 17, 18, 33, 34, 50, 66, 80, 2], 16, 5),  # items of 1 to 5 contexts
]


def split_of(lengths):
    """Build a split whose id at each position is the position; items are apart."""
    if isinstance(lengths, int):
        return Split(np.arange(lengths, dtype=np.uint16))
    items, start = [], 5
    for length in lengths:
        items.append((start, start + length))
        start += length + 10
    return Split(np.arange(start, dtype=np.uint16), tuple(items))


def targets_of(split):
    """Return the position of every character but the first of a segment."""
    return [i for start, end in split.segments for i in range(start + 1, end)]


def window_starts(batches, steps):
    """Return the position of the first character of each window of `steps`."""
    return np.concatenate([batches(step)[0][:, 0] for step in steps])


def epochs(batches, count):
    """Return the targets of each of the first `count` epochs, of batches with a batch_size of 1."""
    n = batches.windows_per_epoch
    return [
        np.concatenate([batches(i)[1][0] for i in range(e * n, e * n + n)]) for e in range(count)
    ]


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


@pytest.mark.parametrize(("lengths", "block_size", "_"), SHAPES)
def test_every_epoch_predicts_every_character_exactly_once(lengths, block_size, _):
    split = split_of(lengths)
    for targets in epochs(Batches(split, block_size, 1, seed=3), 30):
        assert sorted(targets[targets != IGNORED]) == targets_of(split)


def test_items_are_cut_into_as_few_windows_as_they_need_none_empty_each_epoch_elsewhere():
    batches = Batches(split_of([26, 42]), block_size=16, batch_size=1, seed=2)
    assert batches.windows_per_epoch == 2 + 3
    assert all(batches.predictions(i) for i in range(500))
    cuts = set(window_starts(batches, range(500)).tolist())
    assert cuts == {5, *range(5 + 9, 5 + 17), 41, *range(41 + 9, 41 + 17), *range(41 + 25, 41 + 33)}


def test_epochs_differ_in_order_and_in_where_the_text_is_cut():
    batches = Batches(split_of(1000), 16, 1, seed=4)
    order, cuts = set(), set()
    for epoch in range(200):
        n = batches.windows_per_epoch
        starts = window_starts(batches, range(epoch * n, epoch * n + n))
        order.add(tuple(np.argsort(starts)))
        cuts.add(int(np.sort(starts[starts > 0])[0]))
    assert len(order) == 200 and cuts == set(range(1, 17))


def test_two_items_are_cut_at_independent_places():
    split = split_of([100, 100])
    batches, cuts = Batches(split, 16, 1, seed=5), []
    n = batches.windows_per_epoch
    for epoch in range(500):
        starts = window_starts(batches, range(epoch * n, epoch * n + n))
        inside = [starts[(a < starts) & (starts < b)].min() - a for a, b in split.items]
        cuts.append(inside)
    assert abs(np.corrcoef(np.array(cuts).T)[0, 1]) < 0.2


@pytest.mark.parametrize(("lengths", "block_size", "batch_size"), SHAPES)
def test_predictions_and_epochs_count_what_is_read(lengths, block_size, batch_size):
    split = split_of(lengths)
    batches = Batches(split, block_size, batch_size, seed=6)
    read = 0
    for step in range(4 * batches.windows_per_epoch):  # whole epochs
        count = np.count_nonzero(batches(step)[1] != IGNORED)
        assert batches.predictions(step) == count
        read += count
    assert batches.epochs(step + 1) == pytest.approx(read / len(targets_of(split)), rel=1e-12)


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
    assert batches(0)[0][:, 0].tolist() == [623, 1136, 1088, 911, 79, 255, 511, 463]
    assert batches(10**6)[0][:, 0].tolist() == [948, 68, 452, 868, 100, 324, 164, 116]


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


@pytest.mark.parametrize("lengths", [1000, 1001, 10, [40, 35, 10] * 20])
def test_spread_takes_whole_windows_of_a_text_or_whole_items_from_its_start_to_its_end(lengths):
    split = split_of(lengths)
    for wanted in (0, 100, 500):
        part = split.spread(wanted, block_size=16)
        lengths_of = {end - start - 1 for start, end in part.items}
        assert part.ids is split.ids and part.items == split.spread(wanted, block_size=16).items
        if split.items:
            assert set(part.items) <= set(split.items)
        else:
            assert lengths_of == {min(16, len(split) - 1)}
        predictions = len(targets_of(part))
        assert predictions >= 1 and (len(split) < 20 or abs(predictions - wanted) <= 40), wanted
        if wanted:
            assert part.items[0][0] == split.segments[0][0]
            assert part.items[-1][1] == split.segments[-1][1]


# Examples in docstrings


def test_the_examples_in_the_docstrings_are_correct():
    key = splitmix(np.array([2], np.uint64), np.array([0], np.uint64))
    assert permute(np.arange(5, dtype=np.uint64), 5, key).tolist() == [2, 1, 3, 0, 4]
    assert permute(np.array([3], np.uint64), 5, key).tolist() == [0]
    batches = Batches(Split(np.arange(10, dtype=np.uint8)), 3, 2, seed=0)
    for i in range(2):
        for part in batches(i):
            assert str(part.tolist()).replace(str(IGNORED), "_") in Batches.__doc__
    assert "[2, 1, 3, 0, 4]" in permute.__doc__ and "[3], 5, key) -> [0]" in permute.__doc__
