"""An n-gram model of a text: it predicts a character from counts of what followed the last few.

B batch, T predicted tokens, S total tokens, V vocabulary
"""

from dataclasses import dataclass

import numpy as np

FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)  # where counts do not define the discounts; KenLM's defaults
MAX_NGRAMS = 2**63  # n-grams are encoded as base-V integers below this limit


@dataclass(frozen=True, eq=False)
class NgramTable:
    """The n-grams of one length n: contexts of n - 1 characters, and an entry for each next one.

    contexts    contexts as base-V integers, sorted
    starts      entries starts[i] to starts[i + 1] - 1 belong to context i
    characters  the next character of each entry
    probs       the discounted probability of each entry
    backoffs    the backoff weight of each context: the probability mass freed by discounting
    """

    contexts: np.ndarray
    starts: np.ndarray
    characters: np.ndarray
    probs: np.ndarray
    backoffs: np.ndarray


class NgramModel:
    """An n-gram model with modified Kneser-Ney smoothing, interpolated.

    (Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling",
    section 3.) The longest n-grams have `order` characters. For a large vocabulary they are
    shorter: vocab_size^order must not exceed MAX_NGRAMS.

    Each order discounts its counts, and interpolates with the order below by the freed mass:

        p_n(c | context) = (count(context + c) - discount) / sum of the counts after context
                           + backoff(context) * p_(n-1)(c | context without its first character)

    Order 1 interpolates with the uniform distribution. Below the highest order, the count is the
    continuation count: the number of distinct characters that precede the n-gram.
    """

    def __init__(self, ids: np.ndarray, order: int, vocab_size: int):
        """Count the n-grams of ids (N,), which must not be empty."""
        self.vocab_size = vocab_size
        while order > 1 and (vocab_size**order > MAX_NGRAMS or order > len(ids)):
            order -= 1
        self.tables: list[NgramTable] = []  # [n - 1] has the n-grams of length n
        ngrams, counts = np.unique(self._encode(ids[None], order), return_counts=True)
        for n in range(order, 0, -1):
            self.tables.insert(0, build_table(ngrams, counts, vocab_size))
            # Drop the first character; the new count is the number of distinct predecessors.
            ngrams, counts = np.unique(ngrams % vocab_size ** (n - 1), return_counts=True)
        unigrams = self.tables[0]
        uniform = np.full(vocab_size, 1 / vocab_size, np.float32)
        self.unigram_probs = unigrams.backoffs[0] * uniform  # (V,)
        self.unigram_probs[unigrams.characters] += unigrams.probs

    @property
    def order(self) -> int:
        """The length of the longest n-grams."""
        return len(self.tables)

    def probs(self, ids: np.ndarray, new: int) -> np.ndarray:
        """Return the probabilities after each of the last `new` tokens of ids (B, S): (B, T, V).

        Contexts do not extend before the first token of `ids`.
        """
        ids = ids[:, -(new + self.order - 1) :]
        probs = np.tile(self.unigram_probs, (len(ids) * new, 1))  # (B T, V)
        rows = np.arange(len(probs)).reshape(len(ids), new)  # (B, T)
        for n, table in enumerate(self.tables[1 : ids.shape[1] + 1], 2):
            contexts = self._encode(ids, n - 1)[:, -new:]  # the first tokens may lack a context
            row = rows[:, new - contexts.shape[1] :].ravel()
            i = np.searchsorted(table.contexts, contexts.ravel())
            i[i == len(table.contexts)] = 0  # larger than all contexts, so not equal to the first
            known = table.contexts[i] == contexts.ravel()
            row, i = row[known], i[known]
            probs[row] *= table.backoffs[i, None]
            starts, ends = table.starts[i], table.starts[i + 1]
            entries = concatenate_ranges(starts, ends)
            row_of_entry = np.repeat(row, ends - starts)
            probs[row_of_entry, table.characters[entries]] += table.probs[entries]
        return probs.reshape(len(ids), new, self.vocab_size)

    def _encode(self, ids: np.ndarray, n: int) -> np.ndarray:
        """Encode every n-gram of ids (B, S) as a base-V integer: (B, S - n + 1), int64."""
        count = ids.shape[1] - n + 1
        codes = np.zeros((len(ids), count), np.int64)
        for i in range(n):
            codes = codes * self.vocab_size + ids[:, i : count + i]
        return codes


def concatenate_ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the integers from starts[0] to ends[0] - 1, from starts[1] to ends[1] - 1, ..."""
    lengths = ends - starts
    first = np.cumsum(lengths) - lengths  # index of each range's first integer in the result
    return np.arange(lengths.sum()) + np.repeat(starts - first, lengths)


def build_table(ngrams: np.ndarray, counts: np.ndarray, vocab_size: int) -> NgramTable:
    """Build the table of one order from its sorted n-grams (base-V integers) and their counts."""
    discounts = np.array([0.0, *kneser_ney_discounts(counts)])[np.minimum(counts, 3)]
    contexts, starts = np.unique(ngrams // vocab_size, return_index=True)
    totals = np.add.reduceat(counts, starts)
    entries = np.diff(starts, append=len(ngrams))
    return NgramTable(
        contexts=contexts,
        starts=np.append(starts, len(ngrams)),
        characters=(ngrams % vocab_size).astype(np.int32),
        probs=((counts - discounts) / np.repeat(totals, entries)).astype(np.float32),
        backoffs=(np.add.reduceat(discounts, starts) / totals).astype(np.float32),
    )


def kneser_ney_discounts(counts: np.ndarray) -> tuple[float, ...]:
    """Return the discounts of counts 1, 2, and 3 or more.

    All are above 0, so that every context leaves some mass to the lower order.
    """
    n1, n2, n3, n4 = (int((counts == k).sum()) for k in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return FALLBACK_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    discounts = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
    return discounts if min(discounts) > 0 else FALLBACK_DISCOUNTS
