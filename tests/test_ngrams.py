"""The n-gram model against a plain implementation of its definition."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.ngrams import NgramModel

V = 5


class PlainKneserNey:
    """Modified Kneser-Ney smoothing by dictionaries, as Chen and Goodman 1998 define it."""

    def __init__(self, text, order, vocab_size):
        self.vocab_size, self.counts = vocab_size, {}
        ngrams = [tuple(text[i : i + order]) for i in range(len(text) - order + 1)]
        counts = Counter(ngrams)
        for n in range(order, 0, -1):
            self.counts[n] = counts
            counts = Counter(ngram[1:] for ngram in counts)  # different first characters
        self.discounts = {n: self._discounts(n) for n in self.counts}

    def _discounts(self, n):
        of_count = Counter(self.counts[n].values())
        if not (of_count[1] and of_count[2] and of_count[3]):
            return [0, 0.5, 1, 1.5]
        y = of_count[1] / (of_count[1] + 2 * of_count[2])
        found = [0] + [k - (k + 1) * y * of_count[k + 1] / of_count[k] for k in (1, 2, 3)]
        return found if min(found[1:]) > 0 else [0, 0.5, 1, 1.5]

    def prob(self, context, character):
        """The probability of a character after a context shorter than the longest n-gram."""
        if len(context) == 0:
            lower = 1 / self.vocab_size
        else:
            lower = self.prob(context[1:], character)
        counts, discounts = self.counts[len(context) + 1], self.discounts[len(context) + 1]
        after = {ngram: count for ngram, count in counts.items() if ngram[:-1] == context}
        if not after:
            return lower
        total = sum(after.values())
        count = after.get((*context, character), 0)
        left = sum(discounts[min(each, 3)] for each in after.values())
        return (count - discounts[min(count, 3)] + left * lower) / total


def text_of(length, seed=0):
    """A random text in which some n-grams are frequent and one character is missing."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, V - 1, length) * rng.integers(0, 2, length)


@pytest.mark.parametrize("order, length", [(1, 9), (3, 300), (5, 60), (4, 2000)])
def test_probabilities_are_those_of_the_definition(order, length):
    text = text_of(length, order)
    ids = np.random.default_rng(1).integers(0, V, (3, 9))
    ids[0, :6] = text[:6]
    found = NgramModel(text, order, V).probs(ids, 9)
    plain = PlainKneserNey(text.tolist(), order, V)
    for row in range(3):
        for t in range(9):
            context = tuple(ids[row, max(0, t + 2 - order) : t + 1].tolist()) if order > 1 else ()
            expected = [plain.prob(context, character) for character in range(V)]
            assert found[row, t] == pytest.approx(expected, abs=1e-6), (row, t)
    assert np.abs(found.sum(-1) - 1).max() < 1e-6 and found.min() > 0
