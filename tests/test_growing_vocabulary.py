"""Characters that are added to a vocabulary come last: old ids and n-grams stay as they were."""

import random

import pytest
import torch

from configs.schema import NGRAM_ROWS
from data.tokenizer import CharTokenizer
from model.gpt import hash_ngrams

ALPHABET = [chr(code) for code in range(32, 1200)]


def grow(rng, size, added):
    """Return a random vocabulary of `size`, and the same with `added` characters at its end."""
    characters = rng.sample(ALPHABET, size + added)
    old = "".join(sorted(characters[:size]))
    return old, old + "".join(sorted(characters[size:]))


def test_no_added_character_shares_the_n_grams_of_an_old_one():
    rng = random.Random(0)
    for _ in range(500):
        old, new = grow(rng, rng.randint(2, 300), rng.randint(1, 5))
        tokenizers = CharTokenizer(old), CharTokenizer(new)
        text = "".join(rng.choices(old, k=6))
        before, after = (torch.from_numpy(each.encode(text))[None].long() for each in tokenizers)
        assert torch.equal(hash_ngrams(before, 3), hash_ngrams(after, 3))
        # the same text with another last character: as many rows as there are characters
        texts = [text[:-1] + character for character in new]
        ids = torch.stack([torch.from_numpy(tokenizers[1].encode(each)).long() for each in texts])
        assert len(set(hash_ngrams(ids, 3)[:, -1].tolist())) == len(new)


@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.parametrize("vocab_size", [2, 65, 2047, 2048, 4096])
def test_n_grams_that_differ_in_one_character_never_share_a_row(vocab_size, n):
    rng = torch.Generator().manual_seed(vocab_size)
    for place in range(n):
        ids = torch.randint(vocab_size, (n,), generator=rng).repeat(vocab_size, 1)
        ids[:, place] = torch.arange(vocab_size)
        rows = hash_ngrams(ids, n)[:, -1]
        assert len(rows.unique()) == vocab_size and 0 <= rows.min() <= rows.max() < NGRAM_ROWS
