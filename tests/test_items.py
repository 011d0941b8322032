"""Items of a list: what they are, which of them validate, and what of them counts."""

import pytest

from common.errors import DataError
from data.batches import IGNORED
from data.items import hold_out
from tests.texts import error_message, load, segments_of, write

NAMES = ["ada", "bo", "cyd", "bo", "eve-marie", "fo", "gil", "hedy", "ivo", "jo", "kim", "lea"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder."""
    monkeypatch.chdir(tmp_path)


def all_segments(corpus) -> list[str]:
    return segments_of(corpus.train, corpus.val, of=corpus)


@pytest.mark.parametrize("separator", ["\n", "\n\n", ";", "--"])
@pytest.mark.parametrize("last", [True, False])
def test_each_item_is_a_segment_with_its_end_and_none_sees_another(separator, last):
    items = separator.join(["", *NAMES[:5], "", " ", *NAMES[5:]]) + separator * last
    corpus = load(write("list.txt", items), separator=separator)
    assert all_segments(corpus) == sorted(separator[-1] + name + separator for name in NAMES)
    assert "11 distinct; median length 3 characters, longest 9" in "\n".join(corpus.summary)


def test_the_end_of_a_file_ends_an_item():
    write("lists/a.txt", "one\ntwo"), write("lists/b.txt", "three\nfour\n")
    corpus = load("lists", separator="\\n")
    assert all_segments(corpus) == ["\nfour\n", "\none\n", "\nthree\n", "\ntwo\n"]


@pytest.mark.parametrize(
    ("text", "settings", "items"),
    [
        ("\nX:1\nGAB|\n;\n\nX:2\n;", {"separator": ";"}, ["X:1\nGAB|", "X:2"]),
        ("ode\n one \n \nelegy\n\t\nlay", {"separator": "\n\n"}, ["ode\n one", "elegy", "lay"]),
        ("1=2\n1=2 \n3= \n4=5", {"answer_after": "="}, ["1=2", "1=2", "3=", "4=5"]),
        ("anna;\nbob \n;\u3000;cyd;", {"separator": ";"}, ["anna", "bob", "cyd"]),
        # a blank that separates something stays
        ("anna , bo\n, cyd ", {"separator": ", "}, ["anna ", "bo", "cyd "]),
    ],
)
def test_newlines_around_items_blanks_at_ends_of_lines_and_blank_items_count_as_nothing(
    text, settings, items
):
    corpus = load(write("list.txt", text), **({"separator": "\n"} | settings))
    end = corpus.item_format.separator
    assert all_segments(corpus) == sorted(end[-1] + item + end for item in items)
    assert set(corpus.tokenizer.vocabulary) == set("".join(items) + end)
    assert corpus.characters == len(end.join([*items, ""]))


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_an_item_alone_decides_whether_it_validates(fraction):
    items = [str(number % 150) for number in range(200)]
    train, val = hold_out(items, fraction)
    assert sorted(train + val) == sorted(items) and not set(train) & set(val) and train and val
    more_train, more_val = hold_out([*items[::-1], "another"], fraction)
    assert set(train) <= set(more_train) and set(val) <= set(more_val)


def test_items_of_val_sources_all_validate_and_notes_say_if_they_are_few_or_known():
    write("names.txt", "\n".join(NAMES)), write("held.txt", "bo\nzoe\n")
    corpus = load("names.txt", separator="\\n", val_sources=["held.txt"])
    assert segments_of(corpus.val, of=corpus) == ["\nbo\n", "\nzoe\n"]
    assert len(corpus.train.segments) == len(NAMES)
    assert "note: 2 items to validate on: the validation loss says little" in corpus.summary
    assert "note: 1 of 2 distinct validation items are in the training" in corpus.summary[-1]


@pytest.mark.parametrize(
    ("text", "answer_after", "answers"),
    [
        ("a=bc\n\nda=\n=f\n", "=", ["\n=f\n\n", "bc\n\n"]),
        ("a\nx\n\n\nb\n", "\n", ["\n\n", "x\n\n"]),
    ],
)
def test_only_the_answer_and_the_end_of_an_item_count(text, answer_after, answers):
    corpus = load(write("list.txt", text), separator="\\n\\n", answer_after=answer_after)
    counted = [
        corpus.tokenizer.decode([i for i in split.targets[start + 1 : end] if i != IGNORED])
        for split in (corpus.train, corpus.val)
        for start, end in split.segments
    ]
    assert sorted(counted) == answers


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("abc", {}, r"1 distinct item, divided by the separator '\n'; at least 2 are needed; "),
        ("ab\nab\n", {}, "1 distinct item, divided"),
        ("1=2\nx\n\ny\n", {"answer_after": "="}, "is missing in 2 items, first: 'x'; correct or"),
    ],
)
def test_a_text_without_items_to_learn_is_refused(content, settings, message):
    source = write("list.txt", content)
    assert message in error_message(DataError, source, separator="\\n", **settings)
