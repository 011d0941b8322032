"""The n-gram model against probabilities of its definition."""

import numpy as np
import pytest

from benchmarks.ngrams import NgramModel


def text_of(length, seed):
    """A random text in which some n-grams are frequent and one character is missing."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 4, length) * rng.integers(0, 2, length)


def test_bigrams_are_those_of_the_definition():
    # 0 is followed by 1, 1 and 2: (2 - 1) / 3 and (1 - 0.5) / 3 are left after the discounts, and
    # the rest, 1.5 / 3, is spread evenly, because each character has one distinct predecessor
    found = NgramModel(np.array([0, 1, 0, 1, 0, 2]), 2, 3).probs(np.array([[0]]), 1)
    assert found[0, 0] == pytest.approx([1 / 6, 1 / 3 + 1 / 6, 1 / 6 + 1 / 6])


def test_longer_ngrams_have_the_loss_of_a_plain_implementation():
    ids = text_of(500, seed=9)
    found = NgramModel(text_of(2000, seed=4), 4, 5).probs(ids[None, :-1], 499)[0]
    assert np.abs(found.sum(-1) - 1).max() < 1e-6 and found.min() > 0
    # the definition of Chen and Goodman 1998, by dictionaries in Python
    assert -np.log(found[np.arange(499), ids[1:]]).mean() == pytest.approx(1.08987365, abs=1e-6)
