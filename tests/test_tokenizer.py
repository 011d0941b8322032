"""The tokenizer: lossless round trips, the smallest id type and the first character of a text."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.tokenizer import CharTokenizer, distinct_characters


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example("\r\n\0naïve 天地玄黄 👨‍👩‍👧 \U0010ffff!")
@settings(deadline=None)
def test_tokenizer_decode_inverts_encode(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    assert ids.tolist() == [sorted(set(text)).index(c) for c in text]
    assert tokenizer.decode(ids) == text


def test_tokenizer_dtype():
    for size, dtype in ((256, np.uint8), (65_536, np.uint16), (65_537, np.uint32)):
        text = "".join(map(chr, range(0x10000, 0x10000 + size)))
        ids = CharTokenizer(text).encode(text)
        assert ids.dtype == dtype and np.array_equal(ids, np.arange(size))


def test_tokenizer_start_character():
    """A newline, else a space, else the first character."""
    assert [CharTokenizer(v).start_character for v in ("\t\n ab", " ab", "ab")] == ["\n", " ", "a"]


def test_distinct_characters():
    """Of a text that is longer than a chunk, too."""
    text = "ab" * 2**20 + "\U0010ffff"
    assert distinct_characters(text) == set(text)
