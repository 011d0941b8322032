"""The summary of a text: what the start prints, and notes on what is unusual."""

import pytest

from common.words import printable
from data.summary import length_advice
from tests.texts import load, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder."""
    monkeypatch.chdir(tmp_path)


def test_the_summary_lists_counts_split_rarest_characters_and_notes():
    write("folder/a.txt", "hello\x01 world\n" * 50 + "é\x85öö"), write("folder/b.txt", "Ωω\n" * 100)
    assert printable(load("folder", val_fraction=0.05, min_count=2).summary).split("\n") == [
        "text        folder: 2 files, 955 characters, 15 distinct",
        "split       907 characters to train on, 48 (5.0%) to validate on",
        r"rarest      '\x85' (U+0085) 1 time, 'é' (U+00E9) 1 time, 'ö' (U+00F6) 2 times",
        "note: 2 rare characters mapped to '\ufffd' (U+FFFD): "
        r"'\x85' (U+0085), 'é' (U+00E9)",
        "note: 2 characters only in the validation text: 'ö' (U+00F6), '\ufffd' (U+FFFD)",
    ]


def test_the_summary_says_how_much_of_a_long_validation_text_an_evaluation_predicts():
    split = "split       774 characters to train on, 86 (10.0%) to validate on"
    for max_val, end in {0: "", 85: "; an evaluation predicts at most 85 of them, evenly spaced",
                         86: ""}.items():  # fmt: skip
        assert load(write("book.txt"), max_val=max_val).summary[1] == split + end


def test_validation_text_that_stands_in_the_training_text_too_is_noted():
    lines = [f"Line {number}, and {number * 37 % 101}.\n" for number in range(2000)]
    assert not any("duplicated" in line for line in load(write("once.txt", "".join(lines))).summary)
    note = load(write("book.txt", "".join(lines) * 2)).summary[-1]
    assert note.startswith("note: 20 of 20 passages of the validation text, of 200 characters each")
    assert note.endswith("the validation loss is too low; is part of the text duplicated?")


def test_a_text_shorter_than_the_context_and_items_longer_than_it_are_noted():
    text = load(write("book.txt", "abcdefghijklmnopqrst"))
    assert "--block_size=17 is enough" in length_advice(text.train, text.val, block_size=64)
    assert length_advice(text.train, text.val, block_size=17) is None
    # the longest have 8 and 9 characters, with their ends
    items = load(write("names.txt", "ada\nevelina\neve-mari\n"), separator="\\n")
    assert "block_size 7 is too short for 2 items: " in length_advice(items.train, items.val, 7)
    assert length_advice(items.train, items.val, block_size=9) is None
