"""Items of a list: what they are, which of them validate, and what of them counts."""

import pytest

from common.console import DataError
from data.batches import IGNORE_INDEX
from data.items import split_items
from tests.texts import documents_of, error_message, load, write

NAMES = ["ada", "bo", "cyd", "bo", "eve-marie", "fo", "gil", "hedy", "ivo", "jo", "kim", "lea"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder."""
    monkeypatch.chdir(tmp_path)


def all_documents(corpus) -> list[str]:
    return documents_of(corpus.train, corpus.val, of=corpus)


@pytest.mark.parametrize("separator", ["\n", "\n\n", ";", "--"])
@pytest.mark.parametrize("last", [True, False])
def test_item_is_a_document(separator, last):
    """With its end; none sees another."""
    items = separator.join(["", *NAMES[:5], "", " ", *NAMES[5:]]) + separator * last
    corpus = load(write("list.txt", items), separator=separator)
    assert all_documents(corpus) == sorted(separator[-1] + name + separator for name in NAMES)
    n_val = len(corpus.val.documents)
    assert f" {12 - n_val} items to train on, {n_val} (" in corpus.summary[1]


def test_item_ends_with_its_file():
    write("lists/a.txt", "one\ntwo"), write("lists/b.txt", "three\nfour\n")
    corpus = load("lists", separator="\\n")
    assert all_documents(corpus) == ["\nfour\n", "\none\n", "\nthree\n", "\ntwo\n"]


def test_item_alone():
    """It is an item, no text."""
    corpus = load(write("list.txt", "one\ntwo"), separator="\\n")
    assert "split       1 item to train on, 1 (50.0%) to validate on" in corpus.summary


@pytest.mark.parametrize(
    ("text", "settings", "items"),
    [
        ("\nX:1\nGAB|\n;\n\nX:2\n;", {"separator": ";"}, ["X:1\nGAB|", "X:2"]),
        ("ode\n one \n \nelegy\n\t\nlay", {"separator": "\n\n"}, ["ode\n one", "elegy", "lay"]),
        ("1=2\n1=2 \n3= \n4=5", {"answer_after": "="}, ["1=2", "1=2", "3=", "4=5"]),
        ("anna;\nbob \n;\u3000;cyd;", {"separator": ";"}, ["anna", "bob", "cyd"]),
    ],
)
def test_items_without_blanks(text, settings, items):
    """Newlines around items, blanks at ends of lines and blank items count as nothing."""
    corpus = load(write("list.txt", text), **({"separator": "\n"} | settings))
    end = corpus.item_format.separator
    assert all_documents(corpus) == sorted(end[-1] + item + end for item in items)
    assert set(corpus.tokenizer.vocabulary) == set("".join(items) + end)


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_item_validates_by_its_content(fraction):
    items = [str(number % 150) for number in range(200)]
    train, val = split_items([items], fraction)
    assert sorted(train + val) == sorted(items) and not set(train) & set(val) and train and val
    more_train, more_val = split_items([[*items[::-1], "another"]], fraction)
    assert set(train) <= set(more_train) and set(val) <= set(more_val)


def test_items_of_val_sources():
    write("names.txt", "\n".join(NAMES)), write("held.txt", "bo\nzoe\n")
    corpus = load("names.txt", separator="\\n", val_sources=["held.txt"])
    assert documents_of(corpus.val, of=corpus) == ["\nbo\n", "\nzoe\n"]
    assert len(corpus.train.documents) == len(NAMES)
    assert "note: 2 items to validate on; their loss says little" in corpus.summary
    assert "note: 1 of 2 pieces of the validation text are in the training" in corpus.summary[-1]


@pytest.mark.parametrize(
    ("text", "answer_after", "answers"),
    [
        ("a=bc\n\nda=\n=f\n", "=", ["\n=f\n\n", "bc\n\n"]),
        ("a\nx\n\n\nb\ny\n", "\n", ["x\n\n", "y\n\n"]),
    ],
)
def test_answer_and_end_alone_count(text, answer_after, answers):
    corpus = load(write("list.txt", text), separator="\\n\\n", answer_after=answer_after)
    counted = [
        corpus.tokenizer.decode([i for i in split.targets[start + 1 : end] if i != IGNORE_INDEX])
        for split in (corpus.train, corpus.val)
        for start, end in split.documents
    ]
    assert sorted(counted) == answers


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("ab\nab\n", {}, "separator: it yields fewer than 2 distinct items; add some, or "),
        ("1=2\nx\n\ny\n", {"answer_after": "="}, "2 items without '=', first: 'x'; correct or"),
    ],
)
def test_text_without_items(content, settings, message):
    source = write("list.txt", content)
    assert message in error_message(DataError, source, separator="\\n", **settings)
