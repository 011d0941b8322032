"""The tokenizer: lossless round trips, the smallest id type and errors for unknown characters."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.tokenizer import CharTokenizer, UnknownCharacter
from tests.conftest import printed


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example("\r\n\0\x1b")
@example("naïve 天地玄黄 👨‍👩‍👧 \U0010ffff!")
@settings(deadline=None)
def test_ids_are_indices_in_the_sorted_characters_of_a_text_and_decode_inverts_encode(text):
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.vocabulary == "".join(sorted(set(text)))
    ids = tokenizer.encode(text)
    assert ids.tolist() == [sorted(set(text)).index(c) for c in text]
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert len(tokenizer.encode("")) == 0 and tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)]
)
def test_ids_have_the_smallest_dtype_that_holds_the_vocabulary(size, dtype):
    text = "".join(map(chr, range(0x10000, 0x10000 + size)))
    ids = CharTokenizer.from_text(text).encode(text)
    assert ids.dtype == dtype and np.array_equal(ids, np.arange(size))


def test_the_error_names_the_first_unknown_character_and_those_that_are_known():
    with pytest.raises(UnknownCharacter) as raised:
        CharTokenizer.from_text("hello ").encode("hello \xe9")
    message = "'\xe9' (U+00E9) at position 6; the 5 known characters are:  ehlo"
    assert raised.value.exit_code == 2 and message in printed(raised.value)


def test_in_a_vocabulary_the_replacement_character_stands_for_all_others():
    tokenizer = CharTokenizer("ab\ufffd")
    assert tokenizer.decode(tokenizer.encode("a\xe9b\U0001f642\udcff")) == "a\ufffdb\ufffd\ufffd"


@pytest.mark.parametrize(("vocabulary", "start"), [("\t\n ab", "\n"), (" ab", " "), ("ab", "a")])
def test_generation_without_a_prompt_starts_with_a_newline_if_possible(vocabulary, start):
    assert CharTokenizer(vocabulary).start_character == start
