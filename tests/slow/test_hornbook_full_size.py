"""hornbook.py beside train.py at full size."""

from tests.test_hornbook import assert_equal


def test_hornbook_at_full_size():
    """Twenty steps and the exact validation loss are those of train.py."""
    assert_equal(20, "data/plays/admiral.txt", 1e-4)
