"""Streamed texts: bounded memory, a disk cache that is validated, and batches from a memory map."""

import errno
import itertools
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

TEXT = "Ναι, 🙂! The quick brown fox jumps over the lazy dog.\r\n天地玄黄，宇宙洪荒。\r" * 40
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "gb18030", "utf-7"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty folder with its own cache, and stream texts of every size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "LARGE", 0)
    return tmp_path


def cached_files():
    return sorted(path.name for path in Path("cache/hornbook").glob("*"))


def load(*sources, vocabulary=None, **settings):
    return load_corpus(DataConfig(sources=sources, **settings), vocabulary=vocabulary)


def find(path):
    return find_text(DataConfig(sources=(path,)), "sources")


def write(name, text=TEXT, encoding="utf-8"):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return name


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
@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_the_chunk_size_does_not_change_the_text(encoding, chunk, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    write("book.txt", TEXT, encoding)
    marked = encoding in ("utf-8-sig", "utf-16", "utf-32")
    corpus = load("book.txt", encoding="utf-8" if marked else encoding)
    assert text_of(corpus) == TEXT
    assert any(line.startswith("note: 40 lines end in") for line in corpus.summary)
    unix = load("book.txt", encoding="utf-8" if marked else encoding, newlines="unix")
    assert text_of(unix) == TEXT.replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"first\nsecond caf\xe9\n", "not UTF-8 at byte 16 (line 2)"),
        (b"\xef\xbb\xbfone\ntwo\nthree \xff", "not UTF-8 at byte 17 (line 3)"),
        (b"abc\xe2\x82", "not UTF-8 at byte 3 (line 1)"),
        (b"\xff\xfe" + "a\nbc".encode("utf-16-le") + b"x", "not UTF-16-LE at byte 10 (line 2)"),
    ],
)
def test_undecodable_bytes_are_reported_with_offset_and_line_for_any_chunk_size(
    content, expected, chunk, monkeypatch
):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    with pytest.raises(DataError, match=r"book\.txt: ") as raised:
        load(write("book.txt", content))
    assert expected in str(raised.value)
    assert cached_files() == []


def test_a_streamed_text_equals_one_read_into_memory(monkeypatch):
    write("books/a.txt"), write("books/b.txt", TEXT[::-1])
    streamed = load("books")
    monkeypatch.setattr(text, "LARGE", 10**9)
    in_memory = load("books")
    assert isinstance(streamed.train.ids, StoredArray)
    assert isinstance(in_memory.train.ids, np.ndarray)
    assert (
        np.array_equal(streamed.train.ids, in_memory.train.ids)
        and streamed.train.ids.dtype == in_memory.train.ids.dtype
    )
    assert (streamed.train.segments, streamed.val.segments) == (
        in_memory.train.segments,
        in_memory.val.segments,
    )
    assert [line for line in streamed.summary if "is cached in" not in line] == in_memory.summary


@pytest.mark.parametrize("characters", ["abc\n", "аб🙂\n"])
def test_memory_does_not_grow_with_the_text(characters, monkeypatch):
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


def test_batches_are_read_from_the_file_without_a_copy_of_the_corpus():
    corpus = load(write("book.txt"))
    assert isinstance(corpus.train.ids, StoredArray) and corpus.val.ids is corpus.train.ids
    x, y = Batches(corpus.train, 16, 4, seed=1)(0)
    assert all(
        corpus.tokenizer.decode(row) in TEXT for row in np.concatenate([x, y[:, -1:]], axis=1)
    )


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


def test_an_entry_is_checked_by_reading_it_once(monkeypatch):
    load(write("book.txt"))
    read, pieces = os.read, []

    def counted(file, count):
        pieces.append(content := read(file, count))
        return content

    monkeypatch.setattr(os, "read", counted)
    for path in Path("cache/hornbook").iterdir():
        pieces.clear()
        make = lambda: pytest.fail("made again")  # noqa: E731
        disk_cache.load_or_make(path.name, np.dtype(np.uint8), make)
        assert sum(map(len, pieces)) == path.stat().st_size


def test_a_cache_that_is_cut_short_while_it_is_used_is_one_line_and_exit_5():
    corpus = load(write("book.txt"))
    (path,) = Path("cache/hornbook").glob("*.ids")
    os.truncate(path, 100)
    words = rf"{path}: this cached text could not be read \(it has been cut "
    with pytest.raises(ResourceError, match=words):
        for step in range(20):
            Batches(corpus.train, 16, 4, seed=1)(step)
    with pytest.raises(ResourceError, match="resume the run"):
        list(evaluation_windows(corpus.val, 16, 4))


def test_a_disk_that_fails_while_the_cache_is_read_is_one_line_and_exit_5(monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    corpus = load(write("book.txt"))
    monkeypatch.setattr(os, "read", fails)
    with pytest.raises(ResourceError, match=r"could not be read \(Input/output error\)"):
        Batches(corpus.train, 16, 4, seed=1)(0)


def test_without_a_home_no_folder_named_tilde_appears(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nor has the user an entry
    with pytest.raises(ResourceError, match="no home folder; set XDG_CACHE_HOME"):
        load(write("book.txt"))
    assert [path.name for path in Path(".").iterdir()] == ["book.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_no_cache_files_and_has_exit_code_5(call, monkeypatch):
    def disk_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, disk_full)
    with pytest.raises(
        ResourceError,
        match=r"cannot be written to .*hornbook \(No space left on device\); free some space",
    ):
        load(write("book.txt"))
    assert cached_files() == [] and ResourceError.exit_code == 5


def test_too_little_disk_space_is_reported_before_encoding(monkeypatch, forbid_reading):
    load(write("book.txt"))
    for path in Path("cache/hornbook").glob("*.ids"):
        path.unlink()
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    forbid_reading()
    with pytest.raises(ResourceError, match=r"0\.0 MB are free"):
        load("book.txt")


def test_an_unwritable_cache_folder_is_a_resource_error(monkeypatch):
    write("cache")  # a file where the folder should be
    with pytest.raises(ResourceError, match="XDG_CACHE_HOME"):
        load(write("book.txt"))


def test_cache_files_are_renamed_into_place_when_complete(monkeypatch):
    renames, replace = [], os.replace

    def recorded(source, target):
        source, target = Path(source), Path(target)
        renames.append((target.exists(), source.parent == target.parent, source.stat().st_size > 0))
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    load(write("book.txt"))
    assert renames == [(False, True, True)] * 2


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


def test_a_text_that_changes_between_the_passes_is_rejected():
    tokenizer = CharTokenizer.from_text(TEXT)
    for content in (TEXT[:-5], TEXT + "x", TEXT[::-1]):
        book = find(write("book.txt"))
        assert book.char_counts.lengths == [len(TEXT)]
        write("book.txt", content)
        with pytest.raises(DataError, match=r"book\.txt: changed while it was read"):
            book.ids(tokenizer, map_unknown=False)
        assert not any(name.endswith(".ids") for name in cached_files())


def test_a_text_removed_between_the_passes_is_an_error():
    book = find(write("book.txt"))
    os.remove("book.txt")
    with pytest.raises(DataError, match=r"book\.txt: cannot be read: No such file"):
        _ = book.char_counts


@pytest.mark.parametrize("large", [0, 10**9])
def test_truncating_or_removing_the_text_during_training_does_not_change_the_batches(
    large, monkeypatch
):
    monkeypatch.setattr(text, "LARGE", large)
    corpus = load(write("book.txt"))
    expected = [Batches(corpus.train, 16, 4, seed=1)(step) for step in range(20)]
    os.truncate("book.txt", 10)
    shutil.rmtree("cache", ignore_errors=True)
    for step, batch in zip(itertools.count(), expected):
        assert np.array_equal(Batches(corpus.train, 16, 4, seed=1)(step), batch)
