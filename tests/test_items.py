"""Items of a list: what they are, which of them validate, and what of them counts."""

import pytest

from common.console import DataError
from data.batches import IGNORE_INDEX
from data.items import split_items
from tests.texts import NAMES, documents_of, error_message, load, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder."""
    monkeypatch.chdir(tmp_path)


DOCUMENTS = [  # separator, two files, their items
    ("\n", "ada\nbo\n", "cyd\nbo", ["ada", "bo", "bo", "cyd"]),
    ("\n\n", "ode\n one \n \nelegy", "\t\nlay", ["elegy", "lay", "ode\n one"]),
    ("--", "anna--\nbob \n", "\u3000--cyd--", ["anna", "bob", "cyd"]),
]


@pytest.mark.parametrize(("separator", "first", "second", "items"), DOCUMENTS)
def test_item_is_a_document(separator, first, second, items):
    """With its end. Newlines around it, blanks at ends of lines and blank items do not count."""
    write("lists/a.txt", first), write("lists/b.txt", second)
    corpus = load("lists", separator=separator)
    documents = documents_of(corpus.train, corpus.val, of=corpus)
    assert documents == [separator[-1] + item + separator for item in items]
    assert set(corpus.tokenizer.vocabulary) == set("".join(items) + separator)
    n_val = len(corpus.val.documents)
    assert f" {len(items) - n_val} items to train on, {n_val} (" in corpus.summary[1]


@pytest.mark.parametrize("fraction", [0.01, 0.3])
def test_item_validates_by_its_content(fraction):
    items = [str(number % 150) for number in range(200)]
    train, val = split_items([items], fraction)
    assert sorted(train + val) == sorted(items) and not set(train) & set(val) and train and val
    more_train, more_val = split_items([[*items[::-1], "another"]], fraction)
    assert set(train) <= set(more_train) and set(val) <= set(more_val)


def test_items_of_val_sources():
    write("names.txt", "\n".join(NAMES)), write("held.txt", "bo\neve\n")
    corpus = load("names.txt", separator="\\n", val_sources=["held.txt"])
    assert documents_of(corpus.val, of=corpus) == ["\nbo\n", "\neve\n"]
    assert "note: 2 items to validate on; their loss says little" in corpus.summary
    assert "note: 1 of 2 pieces of the validation text are in the training" in corpus.summary[-1]


def test_answer_and_end_alone_count():
    write("list.txt", "a=bc\n\nda=\n=f\n")
    corpus = load("list.txt", separator="\\n\\n", answer_after="=")
    counted = [
        corpus.tokenizer.decode([i for i in split.targets[start + 1 : end] if i != IGNORE_INDEX])
        for split in (corpus.train, corpus.val)
        for start, end in split.documents
    ]
    assert sorted(counted) == ["\n=f\n\n", "bc\n\n"]


def test_text_without_items():
    write("list.txt", "ab\nab\n")
    message = error_message(DataError, "list.txt", separator="\\n")
    assert message.startswith("separator: it yields fewer than 2 distinct items; add some, or ")
    write("list.txt", "1=2\nx\n\ny\n")
    message = error_message(DataError, "list.txt", separator="\\n", answer_after="=")
    assert "2 items without '=', first: 'x'; correct or" in message
