"""Corpora: the vocabulary, which part of a text is held out for validation, what a start prints."""

import pytest

from common.console import DataError
from data.corpus import length_advice
from tests.texts import error_message, load, parts_of, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder."""
    monkeypatch.chdir(tmp_path)


def test_corpus_holds_out_ends():
    """Of each file; they are joined, and one that does not end in a newline gets one."""
    write("folder/a.txt", "Ωmega is the last of.\n"), write("folder/b.txt", "b" * 20)
    write("folder/c.txt", "")
    corpus = load("folder")
    assert parts_of(corpus) == ["Ωmega is the last o" + "b" * 18, "f.\nbb\n"]
    assert corpus.tokenizer.vocabulary == "\n .abefghilmostΩ"


def test_corpus_with_val_sources():
    write("book.txt", "aaab" * 50), write("val.txt", "abac" * 20)
    corpus = load("book.txt", val_sources=["val.txt"])
    assert parts_of(corpus) == ["aaab" * 50, "abac" * 20]
    assert corpus.val_sha256 == load("val.txt").text.sha256


@pytest.mark.parametrize("content", ["o" * 1000, "", "abcdefghi"])
def test_corpus_without_anything_to_predict(content):
    message = error_message(DataError, write("book.txt", content))
    assert message == "book.txt: too few characters to train and validate, or all the same"


def test_summary():
    """The counts and the split."""
    write("folder/a.txt", "hello world\n" * 50 + "éöö"), write("folder/b.txt", "Ωω\n" * 100)
    assert load("folder", val_fraction=0.05).summary == [
        "text        folder: 2 files, 904 characters, 13 distinct",
        "split       858 characters to train on, 46 (5.1%) to validate on",
    ]


def test_summary_notes_a_leak():
    lines = "".join(f"Line {number}, and {number * 37 % 101}.\n" for number in range(2000))
    write("once.txt", lines), write("twice.txt", lines * 2)
    for corpus in (load("twice.txt"), load("once.txt", val_sources=["*ce.txt"])):
        note = corpus.summary[-1]
        assert note.startswith("note: 20 of 20 pieces of the validation text are in the training")


def test_summary_notes_the_length():
    """A text shorter than the context, items longer than it."""
    write("list.txt", "ada\nevelina\neve-mari\n")
    text, items = load("list.txt"), load("list.txt", separator="\\n")
    assert "--block_size=17 is enough" in length_advice(text, 18)
    assert "too short for items of 9 characters" in length_advice(items, 8)
    assert length_advice(text, 17) is length_advice(items, 9) is None
