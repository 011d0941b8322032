"""Texts of any size: two passes in little memory, a cache that is right or made again, and windows
read from a map.
"""

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
from data import disk_cache, streaming, text_files
from data.batches import Batches, evaluation_windows
from data.corpus import load_corpus
from data.disk_cache import StoredIds
from data.streaming import StreamedText
from data.text_files import Source
from data.tokenizer import CharTokenizer

TEXT = "Ναι, 🙂! The quick brown fox jumps over the lazy dog.\r\n天地玄黄，宇宙洪荒。\r" * 40
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "gb18030", "utf-7"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder with a cache of its own, in which every text is a large one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(streaming, "LARGE", 0)
    return tmp_path


def kept():
    return sorted(path.name for path in Path("cache/hornbook").glob("*"))


def load(*text_files, **settings):
    return load_corpus(text_files, notify=print, **settings)


def write(name, text=TEXT, encoding="utf-8"):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return name


def text_of(corpus):
    return corpus.tokenizer.decode(corpus.train.ids)


@pytest.fixture
def no_pass(monkeypatch):
    """From when it is called, reading a text again is an error."""

    def forbid():
        monkeypatch.setattr(
            StreamedText, "_pieces", lambda *_: pytest.fail("the text is read again")
        )

    return forbid


# The passes


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_a_text_is_the_same_wherever_it_is_cut(encoding, chunk, monkeypatch):
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
    ("content", "words"),
    [
        (b"first\nsecond caf\xe9\n", "not UTF-8 at byte 16 (line 2)"),
        (b"\xef\xbb\xbfone\ntwo\nthree \xff", "not UTF-8 at byte 17 (line 3)"),
        (b"abc\xe2\x82", "not UTF-8 at byte 3 (line 1)"),
        (b"\xff\xfe" + "a\nbc".encode("utf-16-le") + b"x", "not UTF-16-LE at byte 10 (line 2)"),
    ],
)
def test_undecodable_bytes_are_named_with_offset_and_line_wherever_the_text_is_cut(
    content, words, chunk, monkeypatch
):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    with pytest.raises(DataError, match=r"book\.txt: ") as raised:
        load(write("book.txt", content))
    assert words in str(raised.value)
    assert kept() == []


def test_a_large_text_is_what_a_small_one_is(monkeypatch):
    write("books/a.txt"), write("books/b.txt", TEXT[::-1])
    large = load("books")
    monkeypatch.setattr(streaming, "LARGE", 10**9)
    small = load("books")
    assert isinstance(large.train.ids, StoredIds) and isinstance(small.train.ids, np.ndarray)
    assert (
        np.array_equal(large.train.ids, small.train.ids)
        and large.train.ids.dtype == small.train.ids.dtype
    )
    assert (large.train.segments, large.val.segments) == (small.train.segments, small.val.segments)
    assert [line for line in large.summary if "is cached in" not in line] == small.summary


@pytest.mark.parametrize("characters", ["abc\n", "аб🙂\n"])
def test_memory_is_bounded_whatever_the_size(characters, monkeypatch):
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
    assert isinstance(corpus.train.ids, StoredIds) and corpus.val.ids is corpus.train.ids
    x, y = Batches(corpus.train, 16, 4, seed=1)(0)
    assert all(
        corpus.tokenizer.decode(row) in TEXT for row in np.concatenate([x, y[:, -1:]], axis=1)
    )


# The cache


def test_the_second_start_reads_no_text(no_pass):
    first = load(write("book.txt"))
    assert len(kept()) == 2
    no_pass()
    again = load("book.txt")
    assert again.summary == first.summary and np.array_equal(again.train.ids, first.train.ids)
    os.rename("book.txt", "other.txt")
    assert text_of(load("other.txt", vocabulary=first.tokenizer.vocabulary)) == TEXT
    assert any("cache/hornbook; it may be deleted" in line for line in again.summary)


def test_another_text_or_other_settings_are_made_anew():
    load(write("book.txt"))
    for settings in (
        {"newlines": "unix"},
        {"min_count": 41},
        {"vocabulary": "".join(sorted({*TEXT, "x", "z", "~"}))},
    ):
        before = set(kept())
        load("book.txt", **settings)
        assert before < set(kept()), settings
    before = set(kept())
    assert text_of(load(write("book.txt", TEXT[1:]))) == TEXT[1:]
    assert before < set(kept())


def test_a_cache_entry_that_is_not_intact_is_made_again():
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
        assert disk_cache.get(path.name)
        assert sum(map(len, pieces)) == path.stat().st_size


def test_a_cache_that_is_cut_short_while_it_is_used_is_one_line_and_exit_5():
    corpus = load(write("book.txt"))
    (path,) = Path("cache/hornbook").glob("*.ids")
    os.truncate(path, 100)
    words = rf"{path}: this encoded text in the cache failed while it was read \(it has been cut "
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
    with pytest.raises(ResourceError, match=r"failed while it was read \(Input/output error\)"):
        Batches(corpus.train, 16, 4, seed=1)(0)


def test_without_a_home_no_folder_named_tilde_appears(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nor has the user an entry
    with pytest.raises(ResourceError, match="no home folder; set XDG_CACHE_HOME"):
        load(write("book.txt"))
    assert [path.name for path in Path(".").iterdir()] == ["book.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fills_leaves_nothing_and_is_told_with_5(call, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(
        ResourceError,
        match=r"cannot be written to .*hornbook \(No space left on device\); free some space",
    ):
        load(write("book.txt"))
    assert kept() == [] and ResourceError.exit_code == 5


def test_a_disk_too_small_is_found_before_anything_is_encoded(monkeypatch, no_pass):
    load(write("book.txt"))
    for path in Path("cache/hornbook").glob("*.ids"):
        path.unlink()
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    no_pass()
    with pytest.raises(ResourceError, match=r"0\.0 MB are free"):
        load("book.txt")


def test_a_place_that_cannot_be_written_is_told_with_5(monkeypatch):
    write("cache")  # a file where the folder should be
    with pytest.raises(ResourceError, match="XDG_CACHE_HOME"):
        load(write("book.txt"))


def test_the_cache_appears_in_one_step(monkeypatch):
    seen, replace = [], os.replace

    def watched(source, target):
        source, target = Path(source), Path(target)
        seen.append((target.exists(), source.parent == target.parent, source.stat().st_size > 0))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    load(write("book.txt"))
    assert seen == [(False, True, True)] * 2


def test_what_has_long_been_unused_is_removed():
    load(write("old.txt", TEXT + "old"))
    old = kept()
    week = time.time() - 8 * 86400
    for name in old:
        os.utime(Path("cache/hornbook", name), (week, week))
    Path("cache/hornbook/killed.ids.tmp.0").touch()
    os.utime("cache/hornbook/killed.ids.tmp.0", (week, week))
    load(write("book.txt"))
    assert "killed.ids.tmp.0" not in kept() and set(old) < set(kept())
    ages = time.time() - (disk_cache.MAX_UNUSED_DAYS + 1) * 86400
    for name in kept():
        os.utime(Path("cache/hornbook", name), (ages, ages))
    load("old.txt")  # a use
    load(write("new.txt", TEXT + "new"))
    assert set(old) < set(kept()) and len(kept()) == 4


# A text that changes


def test_a_text_that_changes_between_the_passes_is_refused():
    tokenizer = CharTokenizer.from_text(TEXT)
    for content in (TEXT[:-5], TEXT + "x", TEXT[::-1]):
        text = StreamedText(Source.parse(write("book.txt")).find(None, print))
        assert text.char_counts.lengths == [len(TEXT)]
        write("book.txt", content)
        with pytest.raises(DataError, match=r"book\.txt: changed while it was read"):
            text.ids(tokenizer, map_unknown=False)
        assert not any(name.endswith(".ids") for name in kept())


def test_a_text_that_goes_away_between_the_passes_is_an_error():
    text = StreamedText(Source.parse(write("book.txt")).find(None, print))
    os.remove("book.txt")
    with pytest.raises(DataError, match=r"book\.txt: cannot be read: No such file"):
        _ = text.char_counts


@pytest.mark.parametrize("large", [0, 10**9])
def test_a_text_that_is_cut_short_or_removed_during_training_changes_nothing(large, monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", large)
    corpus = load(write("book.txt"))
    expected = [Batches(corpus.train, 16, 4, seed=1)(step) for step in range(20)]
    os.truncate("book.txt", 10)
    shutil.rmtree("cache", ignore_errors=True)
    for step, batch in zip(itertools.count(), expected):
        assert np.array_equal(Batches(corpus.train, 16, 4, seed=1)(step), batch)
