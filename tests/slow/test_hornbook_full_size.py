"""hornbook.py beside train.py at full size."""

from tests.test_hornbook import assert_equal, by_hornbook, by_train

TEXT = "data/plays/admiral.txt"


def test_twenty_steps_and_the_exact_validation_loss_are_those_of_train_py():
    ours, theirs = by_hornbook(20, TEXT, 0), by_train(20, TEXT, 0)
    assert_equal(ours, theirs, tolerance=1e-4)
