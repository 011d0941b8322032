"""The tokenizer: lossless round trips, the smallest id type and errors for unknown characters."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.tokenizer import CharTokenizer, distinct_characters


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example("\r\n\0\x1b")
@example("naïve 天地玄黄 👨‍👩‍👧 \U0010ffff!")
@settings(deadline=None)
def test_tokenizer_decode_inverts_encode(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    assert ids.tolist() == [sorted(set(text)).index(c) for c in text]
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert len(tokenizer.encode("")) == 0 and tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)]
)
def test_tokenizer_dtype(size, dtype):
    text = "".join(map(chr, range(0x10000, 0x10000 + size)))
    ids = CharTokenizer(text).encode(text)
    assert ids.dtype == dtype and np.array_equal(ids, np.arange(size))


@pytest.mark.parametrize(("vocabulary", "start"), [("\t\n ab", "\n"), (" ab", " "), ("ab", "a")])
def test_tokenizer_start_character(vocabulary, start):
    assert CharTokenizer(vocabulary).start_character == start


def test_distinct_characters():
    """Of a text that is longer than a chunk, too."""
    text = "ab" * 2**20 + "\U0010ffff"
    assert distinct_characters(text) == set(text) and distinct_characters("") == set()
