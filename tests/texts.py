"""Texts of the tests: write a file, load a corpus, read its parts."""

from pathlib import Path

import pytest

from configs.schema import DataConfig
from data.corpus import Corpus, load_corpus

NAMES = ["ada", "bo", "cyd", "bo", "eve-marie", "fo", "gil", "hedy", "ivo", "jo", "kim", "lea"]
TEXT = "To be, or not to be: that is the question.\n" * 20


def write(path: str, content: str | bytes = TEXT) -> str:
    """Write a file, and the folders it is in; return its path."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def load(*sources: str, vocabulary="", **settings) -> Corpus:
    """Load some sources."""
    return load_corpus(DataConfig(sources=sources, **settings), vocabulary=vocabulary)


def parts_of(corpus: Corpus) -> list[str]:
    """Return the training text and the validation text."""
    return [corpus.tokenizer.decode(split.ids) for split in (corpus.train, corpus.val)]


def documents_of(*splits, of: Corpus) -> list[str]:
    """Return the documents of some splits of a corpus, in alphabetical order."""
    pieces = [split.ids[start:end] for split in splits for start, end in split.documents]
    return sorted(map(of.tokenizer.decode, pieces))


def error_message(error: type[Exception], *sources: str, **settings) -> str:
    """Return the message of the error of a corpus."""
    with pytest.raises(error) as raised:
        load(*sources, **settings)
    return str(raised.value)
