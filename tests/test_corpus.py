"""Corpora: the vocabulary, and which part of a text is held out for validation."""

import pytest

from common.errors import CheckpointError, DataError
from tests.texts import TEXT, error_message, load, parts_of, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder."""
    monkeypatch.chdir(tmp_path)


def test_a_file_is_split_into_its_beginning_and_its_end_and_encoded():
    corpus = load(write("book.txt", TEXT + "Ω"))
    assert corpus.tokenizer.vocabulary == "".join(sorted({*TEXT, "Ω"}))
    train, val = parts_of(corpus)
    assert train + val == TEXT + "Ω" and len(train) == len(TEXT + "Ω") * 9 // 10
    assert corpus.characters == len(TEXT) + 1


@pytest.mark.parametrize(("length", "fraction", "val"), [(21, 0.1, 3), (1000, 0.001, 1)])
def test_of_several_files_the_end_of_each_validates(length, fraction, val):
    first, second = "a" * (length - 1) + "\n", "b" * (length - 1)
    write("folder/a.txt", first), write("folder/b.txt", second), write("folder/c.txt", "")
    corpus = load("folder", val_fraction=fraction)
    # they are joined: one that does not end in a newline gets one
    cut, second = length - val, second + "\n"
    assert parts_of(corpus) == [first[:cut] + second[:cut], first[cut:] + second[cut:]]


def test_val_sources_gives_a_separate_validation_text():
    write("books/a.txt", "aaab" * 50), write("books/b.txt", "abab" * 50)
    write("val.txt", "abac" * 20)
    corpus = load("books", val_sources=["val.txt"])
    assert parts_of(corpus) == ["aaab" * 50 + "\n" + "abab" * 50 + "\n", "abac" * 20]
    assert corpus.tokenizer.vocabulary == "\nabc"
    assert corpus.val_sha256 == load("val.txt").sha256 and corpus.sha256 == load("books").sha256
    message = error_message(
        CheckpointError, "books", val_sources=["val.txt"], expected=(None, corpus.sha256)
    )
    assert message.startswith("val.txt is not the text of this run: SHA-256 ")


def test_the_training_text_is_refused_as_validation_text():
    write("folder/a.txt")
    message = error_message(DataError, "folder", val_sources=["*/a.txt"])
    assert message.startswith("val_sources: ") and "is the same text as sources" in message


def test_rare_characters_are_mapped_to_unk():
    corpus = load(write("book.txt", TEXT + "é🙂🙂éx\ufffd"), min_count=3)
    assert "".join(parts_of(corpus)) == TEXT + "\ufffd" * 6
    vocabulary = corpus.tokenizer.vocabulary
    assert vocabulary == "".join(sorted({*TEXT, "\ufffd"}))
    # a resumed run, and a text without rare characters
    resumed = load("book.txt", min_count=3, vocabulary=vocabulary)
    assert parts_of(resumed) == parts_of(corpus)
    assert "\ufffd" not in load(write("book.txt"), min_count=2).tokenizer.vocabulary
    # the vocabulary of other weights
    other = load("book.txt", vocabulary="\n \ufffdeio", val_fraction=0.5)
    assert "".join(parts_of(other))[:9] == "\ufffdo \ufffde\ufffd o\ufffd"
    error_message(CheckpointError, "book.txt", vocabulary="\n eio")


def test_a_list_learns_its_separator_and_end_of_a_question_however_rare_they_are():
    items = write("list.txt", "ab ?ab|ba b?a|aa ?bé")
    corpus = load(items, separator="|", answer_after="?", min_count=4)
    assert {"|", "?"} < set(corpus.tokenizer.vocabulary)
    assert set(corpus.question) <= set(corpus.tokenizer.vocabulary)  # é is too rare
    with pytest.raises(CheckpointError, match="1 of its characters are not in the checkpoint's"):
        load(items, separator="|", answer_after="?", min_count=4, vocabulary="ab|\ufffd")


@pytest.mark.parametrize(
    ("content", "settings", "expected"),
    [
        ("o" * 1000, {}, "nothing to learn: 1 distinct character; "),
        (TEXT, {"min_count": 10**6}, "nothing to learn: 1 distinct character; "),
        ("", {}, "nothing to learn: 0 distinct characters; use another text"),
        ("abcdefghi", {}, "1 character of validation text; at least 2 are needed"),
    ],
)
def test_a_text_without_anything_to_predict_is_refused(content, settings, expected):
    message = error_message(DataError, write("book.txt", content), **settings)
    assert message.startswith(f"book.txt: {expected}")
