"""Streamed texts: bounded memory, a disk cache that is validated, and batches read from it."""

import errno
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError, ResourceError
from configs.schema import DataConfig
from data import disk_cache, text, text_files
from data.batches import Batches, evaluation_windows
from data.corpus import load_corpus
from data.disk_cache import StoredArray
from data.sources import find_text
from data.text import Text
from data.tokenizer import CharTokenizer
from tests.test_data import write as write_bytes

TEXT = "Ναι, 🙂! The quick brown fox jumps over the lazy dog.\r\n天地玄黄，宇宙洪荒。\r" * 40
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "gb18030", "utf-7"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty folder with its own cache, and stream texts of every size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "MIN_CACHED_SIZE", 0)
    return tmp_path


def cached_files():
    return sorted(path.name for path in Path("cache/hornbook").glob("*"))


def load(*sources, vocabulary=None, **settings):
    return load_corpus(DataConfig(sources=sources, **settings), vocabulary=vocabulary)


def write(name, text=TEXT, encoding="utf-8"):
    return write_bytes(name, text.encode(encoding))


def text_of(corpus):
    return corpus.tokenizer.decode(corpus.train.ids)


@pytest.fixture
def forbid_reading(monkeypatch):
    """Return a function that makes any further reading of a text an error."""

    def forbid():
        monkeypatch.setattr(Text, "_pieces", lambda *_: pytest.fail("the text is read again"))

    return forbid


# Reading in chunks


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_chunk_size_does_not_change_the_text(encoding, chunk, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    write("book.txt", TEXT, encoding)
    marked = encoding in ("utf-8-sig", "utf-16", "utf-32")
    corpus = load("book.txt", encoding="utf-8" if marked else encoding)
    assert text_of(corpus) == TEXT
    assert any(line.startswith("note: 40 lines end in") for line in corpus.summary)
    unix = load("book.txt", encoding="utf-8" if marked else encoding, newlines="unix")
    assert text_of(unix) == TEXT.replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_streamed_text_equals_one_read_into_memory(dtype, monkeypatch):
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 300))) * (dtype == "uint16")
    write("books/a.txt"), write("books/b.txt", many + TEXT[::-1])
    streamed = load("books")
    monkeypatch.setattr(text, "MIN_CACHED_SIZE", 10**9)
    in_memory = load("books")
    assert isinstance(streamed.train.ids, StoredArray)
    assert isinstance(in_memory.train.ids, np.ndarray)
    assert streamed.train.ids.dtype == in_memory.train.ids.dtype == dtype
    for one, other in ((streamed.train, in_memory.train), (streamed.val, in_memory.val)):
        assert np.array_equal(one.ids, other.ids) and one.segments == other.segments
        for step in range(20):
            batches = (Batches(split, 16, 4, seed=1)(step) for split in (one, other))
            assert np.array_equal(*batches)
        windows = (evaluation_windows(split, 16, 4) for split in (one, other))
        assert all(np.array_equal(*batches) for batches in zip(*windows, strict=True))
    assert [line for line in streamed.summary if "is cached in" not in line] == in_memory.summary


@pytest.mark.parametrize("characters", ["abc\n", "аб🙂\n"])
def test_memory_does_not_grow_with_the_text(characters):
    size = 30_000_000
    write("book.txt", characters * (size // len(characters.encode())))
    tracemalloc.start()
    try:
        corpus = load("book.txt")
        batches = Batches(corpus.train, 64, 12, seed=1)
        for step in range(5):
            batches(step)
        next(evaluation_windows(corpus.val, 1, 64))
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()


# The cache


def test_a_second_start_uses_the_cache_without_reading_the_text(forbid_reading):
    first = load(write("book.txt"))
    assert len(cached_files()) == 2
    forbid_reading()
    second = load("book.txt")
    assert second.summary == first.summary and np.array_equal(second.train.ids, first.train.ids)
    os.rename("book.txt", "other.txt")
    assert text_of(load("other.txt", vocabulary=first.tokenizer.vocabulary)) == TEXT
    assert any("cache/hornbook; you can delete it at any time" in line for line in second.summary)


def test_another_text_or_other_settings_get_their_own_cache():
    load(write("book.txt"))
    for settings in (
        {"newlines": "unix"},
        {"min_count": 41},
        {"vocabulary": "".join(sorted({*TEXT, "x", "z", "~"}))},
    ):
        before = set(cached_files())
        load("book.txt", **settings)
        assert before < set(cached_files()), settings
    before = set(cached_files())
    assert text_of(load(write("book.txt", TEXT[1:]))) == TEXT[1:]
    assert before < set(cached_files())


def test_a_damaged_cache_entry_is_rebuilt():
    load(write("book.txt"))
    for path in map(Path, sorted(Path("cache/hornbook").iterdir())):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        swapped = whole[:-32][::-1] + whole[-32:]
        damaged = [bytes(len(whole)), bytes(len(whole) - 32) + whole[-32:], flipped, swapped]
        for content in (*damaged, whole[:-1], whole[:9], b"", whole + b"x"):
            path.write_bytes(content)
            assert text_of(load("book.txt")) == TEXT and path.read_bytes() == whole
        path.unlink()
        path.symlink_to("nowhere")
        assert text_of(load("book.txt")) == TEXT and path.read_bytes() == whole


def cut_short(patch):
    os.truncate(next(Path("cache/hornbook").glob("*.ids")), 100)


def fail(patch):
    def read(*_):
        raise OSError(errno.EIO, "Input/output error")

    patch.setattr(os, "read", read)


@pytest.mark.parametrize(
    ("fault", "reason"), [(cut_short, "it has been cut short"), (fail, "Input/output error")]
)
def test_a_cache_that_can_no_longer_be_read_is_one_line_and_exit_5(fault, reason, monkeypatch):
    corpus = load(write("book.txt"))
    fault(monkeypatch)
    message = rf"\.ids: this cached text could not be read \({reason}\); resume the run"
    with pytest.raises(ResourceError, match=message):
        for step in range(20):
            Batches(corpus.train, 16, 4, seed=1)(step)
    with pytest.raises(ResourceError, match=message):
        list(evaluation_windows(corpus.val, 16, 4))
    assert ResourceError.exit_code == 5


def test_without_a_home_no_folder_named_tilde_appears(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nor has the user an entry
    with pytest.raises(ResourceError, match="no home folder; set XDG_CACHE_HOME"):
        load(write("book.txt"))
    assert [path.name for path in Path(".").iterdir()] == ["book.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_no_cache_files_and_is_one_line(call, monkeypatch):
    def disk_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, disk_full)
    with pytest.raises(
        ResourceError,
        match=r"cannot be written to .*hornbook \(No space left on device\); free some space",
    ):
        load(write("book.txt"))
    assert cached_files() == []


def test_too_little_disk_space_is_reported_before_encoding(monkeypatch, forbid_reading):
    load(write("book.txt"))
    for path in Path("cache/hornbook").glob("*.ids"):
        path.unlink()
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    forbid_reading()
    with pytest.raises(ResourceError, match=r"0\.0 MB are free"):
        load("book.txt")


def test_an_unwritable_cache_folder_is_a_resource_error():
    write("cache")  # a file where the folder should be
    with pytest.raises(ResourceError, match="XDG_CACHE_HOME"):
        load(write("book.txt"))


def test_cache_files_unused_for_long_are_removed():
    load(write("old.txt", TEXT + "old"))
    old = cached_files()
    last_week = time.time() - 8 * 86400
    for name in old:
        os.utime(Path("cache/hornbook", name), (last_week, last_week))
    Path("cache/hornbook/killed.ids.tmp.0").touch()
    os.utime("cache/hornbook/killed.ids.tmp.0", (last_week, last_week))
    load(write("book.txt"))
    assert "killed.ids.tmp.0" not in cached_files() and set(old) < set(cached_files())
    long_ago = time.time() - (disk_cache.MAX_UNUSED_DAYS + 1) * 86400
    for name in cached_files():
        os.utime(Path("cache/hornbook", name), (long_ago, long_ago))
    load("old.txt")  # counts as a use
    load(write("new.txt", TEXT + "new"))
    assert set(old) < set(cached_files()) and len(cached_files()) == 4


# Texts that change


@pytest.mark.parametrize("content", [TEXT[:-5], TEXT + "x", TEXT[::-1], None])
def test_a_text_that_changes_or_disappears_between_the_passes_is_not_cached(content):
    book = find_text(DataConfig(sources=(write("book.txt"),)), "sources")
    assert book.char_counts.lengths == [len(TEXT)]
    counts = cached_files()
    if content is None:
        os.remove("book.txt")
    else:
        write("book.txt", content)
    with pytest.raises(DataError, match=r"book\.txt: (changed while it was|cannot be) read"):
        book.ids(CharTokenizer.from_text(TEXT), map_unknown=False)
    assert cached_files() == counts


@pytest.mark.parametrize("large", [0, 10**9])
def test_truncating_or_removing_the_text_during_training_does_not_change_the_batches(
    large, monkeypatch
):
    monkeypatch.setattr(text, "MIN_CACHED_SIZE", large)
    corpus = load(write("book.txt"))
    expected = [Batches(corpus.train, 16, 4, seed=1)(step) for step in range(20)]
    os.truncate("book.txt", 10)
    shutil.rmtree("cache", ignore_errors=True)
    for step, batch in enumerate(expected):
        assert np.array_equal(Batches(corpus.train, 16, 4, seed=1)(step), batch)
