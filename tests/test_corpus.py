"""Corpora: the vocabulary, which part of a text is held out for validation, what a start prints."""

import pytest

from common.console import DataError
from data.corpus import length_advice
from tests.texts import TEXT, error_message, load, parts_of, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder."""
    monkeypatch.chdir(tmp_path)


def test_corpus_of_a_file():
    corpus = load(write("book.txt", TEXT + "Ω"))
    assert corpus.tokenizer.vocabulary == "".join(sorted({*TEXT, "Ω"}))
    train, val = parts_of(corpus)
    assert train + val == TEXT + "Ω" and len(train) == len(TEXT + "Ω") * 9 // 10


@pytest.mark.parametrize(("length", "fraction", "val"), [(21, 0.1, 3), (1000, 0.001, 1)])
def test_corpus_holds_out_ends(length, fraction, val):
    first, second = "a" * (length - 1) + "\n", "b" * (length - 1)
    write("folder/a.txt", first), write("folder/b.txt", second), write("folder/c.txt", "")
    corpus = load("folder", val_fraction=fraction)
    # they are joined: one that does not end in a newline gets one
    cut, second = length - val, second + "\n"
    assert parts_of(corpus) == [first[:cut] + second[:cut], first[cut:] + second[cut:]]


def test_corpus_with_val_sources():
    write("books/a.txt", "aaab" * 50), write("books/b.txt", "abab" * 50)
    write("val.txt", "abac" * 20)
    corpus = load("books", val_sources=["val.txt"])
    assert parts_of(corpus) == ["aaab" * 50 + "\n" + "abab" * 50 + "\n", "abac" * 20]
    assert corpus.tokenizer.vocabulary == "\nabc"
    assert corpus.val_sha256 == load("val.txt").text.sha256
    assert corpus.text.sha256 == load("books").text.sha256 and corpus.text.contents == []


@pytest.mark.parametrize("content", ["o" * 1000, "", "abcdefghi"])
def test_corpus_without_anything_to_predict(content):
    message = error_message(DataError, write("book.txt", content))
    assert message == "book.txt: too few characters to train and validate, or all the same"


def test_summary():
    """The counts and the split."""
    write("folder/a.txt", "hello world\n" * 50 + "éöö"), write("folder/b.txt", "Ωω\n" * 100)
    text, split, *notes = load("folder", val_fraction=0.05).summary
    assert text == "text        folder: 2 files, 904 characters, 13 distinct"
    assert split == "split       858 characters to train on, 46 (5.1%) to validate on"
    assert not notes


def test_summary_notes_a_leak():
    lines = "".join(f"Line {number}, and {number * 37 % 101}.\n" for number in range(2000))
    assert len(load(write("once.txt", lines)).summary) == 2
    write("twice.txt", lines * 2)
    for corpus in (load("twice.txt"), load("once.txt", val_sources=["*ce.txt"])):
        note = corpus.summary[-1]
        assert note.startswith("note: 20 of 20 pieces of the validation text are in the training")
        assert note.endswith("the validation loss is too low; is part of it duplicated?")


@pytest.mark.parametrize(
    ("content", "data", "enough", "note"),
    [
        ("abcdefghijklmnopqrst", {}, 17, "--block_size=17 is enough"),
        ("ada\nevelina\neve-mari\n", {"separator": "\\n"}, 9, "short for items of 9 characters"),
        ("evelina\neve-mari", {"separator": "\\n"}, 9, "short for items of 9 characters"),
    ],
)
def test_summary_notes_the_length(content, data, enough, note):
    """A text shorter than the context, items longer than it."""
    corpus = load(write("book.txt", content), **data)
    assert note in length_advice(corpus, 7 if data else 64)
    assert length_advice(corpus, enough) is None
