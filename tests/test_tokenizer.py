"""The tokenizer: lossless round trips, the smallest id type and errors for unknown characters."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.tokenizer import CharTokenizer, UnknownCharacter
from tests.conftest import printed


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example("\r\n\0\x1b")
@example("naïve 天地玄黄 👨‍👩‍👧 \U0010ffff!")
def test_ids_are_indices_in_the_sorted_characters_of_a_text_and_decode_inverts_encode(text):
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.vocabulary == "".join(sorted(set(text)))
    assert len(tokenizer) == len(set(text))
    ids = tokenizer.encode(text)
    assert ids.tolist() == [sorted(set(text)).index(c) for c in text]
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert len(tokenizer.encode("")) == 0 and tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)],
)
def test_ids_have_the_smallest_dtype_that_holds_the_vocabulary(size, dtype):
    text = "".join(map(chr, range(0x10000, 0x10000 + size)))
    ids = CharTokenizer.from_text(text).encode(text)
    assert ids.dtype == dtype and np.array_equal(ids, np.arange(size))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello é", "'é' (U+00E9) at position 6"),
        ("Hello", "'H' (U+0048) at position 0"),
        ("h\x1b", r"'\x1b' (U+001B) at position 1"),
        ("ehe🙂🙃", "'🙂' (U+1F642) at position 3"),
        ("he\udcff", r"'\udcff' (U+DCFF) at position 2"),
    ],
)
def test_the_error_names_the_first_unknown_character_and_its_position(text, message):
    with pytest.raises(UnknownCharacter) as raised:
        CharTokenizer.from_text("hello ").encode(text)
    assert raised.value.exit_code == 2 and printed(raised.value).startswith(
        f"not in the vocabulary: {message}; the 5 known characters are:  ehlo; "
    )


@pytest.mark.parametrize(
    "vocabulary, text, form", [("cafe\u0301", "caf\xe9", "NFD"), ("caf\xe9e", "cafe\u0301", "NFC")]
)
def test_the_error_says_that_the_vocabulary_has_the_other_unicode_form(vocabulary, text, form):
    with pytest.raises(UnknownCharacter) as raised:
        CharTokenizer(vocabulary).encode(text)
    hint = f"; the vocabulary has its other Unicode form; normalize the text to {form}"
    assert printed(raised.value).endswith(hint)


@pytest.mark.parametrize("vocabulary", ["", "aba", "a\udc80"])
def test_an_invalid_vocabulary_is_rejected(vocabulary):
    with pytest.raises(ValueError):
        CharTokenizer(vocabulary)


@pytest.mark.parametrize(("vocabulary", "start"), [("\t\n ab", "\n"), (" ab", " "), ("ab", "a")])
def test_generation_without_a_prompt_starts_with_a_newline_if_possible(vocabulary, start):
    assert CharTokenizer(vocabulary).start == start
