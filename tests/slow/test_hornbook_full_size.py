"""hornbook.py beside train.py at full size."""

from tests.test_hornbook import assert_equal


def test_hornbook_at_full_size():
    """The first 20 of the 1,400 steps, and the exact validation loss after them."""
    run, _ = assert_equal(20, ["data/plays/admiral.txt"], 1e-4, "--kernel=batched")
    assert run.settings.train.max_iters == 1400
