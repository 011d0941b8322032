"""Corpora: choice of the source, decoding, splits, downloads, and error messages."""

import errno
import hashlib
import os
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import HTTPSHandler

import numpy as np
import pytest

import data.summary
import data.text
from common.console import printable
from common.errors import CheckpointError, ConfigError, DataError
from configs.schema import DataConfig
from data.corpus import load_corpus
from tests.conftest import printed

TEXT = "To be, or not to be: that is the question.\n" * 20


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data.text, "ROOT", tmp_path / "no code here")
    return tmp_path


def write(path, content=TEXT):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def load(*sources, sha256s=(None, None), vocabulary=None, **settings):
    """Load a corpus; return it and the lines of its summary."""
    data_config = DataConfig(sources=sources, **settings)
    corpus = load_corpus(data_config, sha256s=sha256s, vocabulary=vocabulary)
    return corpus, printable(corpus.summary).split("\n")


def parts_of(corpus):
    """Return the training text and the validation text."""
    return [corpus.tokenizer.decode(split.ids) for split in (corpus.train, corpus.val)]


def text_of(corpus):
    """Return the text of a single file."""
    return "".join(parts_of(corpus))


def error_message(error, *sources, **settings):
    with pytest.raises(error) as raised:
        load(*sources, **settings)
    message = printed(raised.value)
    assert message.count("; ") >= 1
    return message


# Reading texts


def test_a_file_is_read_split_and_encoded():
    corpus, lines = load(write("book.txt", TEXT))
    assert corpus.name == "book.txt" and corpus.sha256 == sha256(TEXT.encode())
    assert corpus.tokenizer.vocabulary == "".join(sorted(set(TEXT)))
    train, val = parts_of(corpus)
    assert train + val == TEXT and len(train) == len(TEXT) * 9 // 10
    assert corpus.characters == len(corpus.train) + len(corpus.val) == len(TEXT)
    assert lines[0] == f"text        book.txt: {len(TEXT)} characters, {len(set(TEXT))} distinct"
    assert lines[1].endswith("to validate on: the last 10%")


def test_a_folder_is_one_text_of_its_text_files_joined_in_the_order_of_their_names():
    texts = {"b.txt": "bbbbbbbbby", "a.TXT": "aaaaaaaaaaaaaaaaaax\n", "empty.txt": ""}
    for name, text in texts.items():
        write(f"plays/{name}", text)
    for other in ("README.md", "notes", ".hidden.txt", "more/c.txt"):
        write(f"plays/{other}", "zzz")
    os.symlink("a.TXT", "plays/link.txt")
    corpus, lines = load("plays")
    assert corpus.train.segments == ((0, len(corpus.train)),)
    assert parts_of(corpus) == ["a" * 18 + "b" * 9, "x\n" + "y\n"]
    assert corpus.name == "plays" and corpus.tokenizer.vocabulary == "\nabxy"
    assert lines[0] == "text        plays: 3 files, 31 characters, 5 distinct"
    assert lines[1].endswith("to validate on: the last 10% of each of 3 files")


def test_a_pattern_is_one_text_of_the_matching_files_each_of_which_counts_once():
    texts = {"b.md": "bbbbbbbbb\n", "a.md": "aaaaaaaaaaaaaaaaaax\n", "more/c.md": "ccccccccc\n"}
    for name, text in texts.items():
        write(f"notes/{name}", text)
    write("notes/other.txt"), write("notes/.hidden.md")
    (Path("notes") / "folder.md").mkdir()
    corpus, lines = load("notes/**/**/*.md")
    assert parts_of(corpus)[0] == "a" * 18 + "b" * 9 + "c" * 9
    assert lines[0] == "text        notes/**/**/*.md: 3 files, 40 characters, 5 distinct"
    assert parts_of(load("notes/[ab].md")[0])[0] == "a" * 18 + "b" * 9
    assert "nothing matches" in error_message(DataError, "notes/*.rst")


def test_of_twenty_files_or_more_whole_ones_validate_unless_their_lengths_are_too_unequal():
    poems = [f"Poem {number}.\n" * 40 for number in range(60)]
    for number, poem in enumerate([*poems, poems[0]]):  # two are equal
        write(f"poems/{number:02}.txt", poem)
    corpus, lines = load("poems")
    train, val = (set(part.splitlines()) for part in parts_of(corpus))
    assert len(train) + len(val) == 60 and not train & val
    assert 3 <= len(val) <= 12 and lines[1].endswith(f" {len(val)} of 61 files")
    # one has most of the text, or there are 19
    write("poems/60.txt", "A long one. " * 10_000)
    assert load("poems")[1][1].endswith("the last 10% of each of 61 files")
    assert load("poems/0*.txt")[1][1].endswith("the last 10% of each of 10 files")


def test_an_existing_file_name_is_not_treated_as_a_pattern():
    corpus, _ = load(write("draft[1]*.txt"), write("draft1.txt", "other " * 20))
    assert text_of(corpus) == TEXT and corpus.name == "draft[1]*.txt"


def test_the_digest_is_of_characters_and_file_borders_not_of_bytes_or_names():
    def digest(*contents, names="abc", **settings):
        folder = Path(f"folder{time.monotonic_ns()}")
        for name, content in zip(names, contents, strict=False):
            write(folder / f"{name}.txt", content)
        return data.text.find_text(DataConfig(sources=(str(folder),), **settings), "sources").sha256

    assert digest("abc", "de") == digest("abc", "de", names="xyz")
    assert digest("abc") == sha256(b"abc")
    others = [("ab", "cde"), ("abcde",), ("de", "abc"), ("abc", "dE"), ("abc", "de", "")]
    assert len({digest("abc", "de"), *(digest(*contents) for contents in others)}) == 6
    # the same characters as other bytes
    text = "naïve\ncafé\n"
    same = [text.replace("\n", "\r\n"), "\ufeff" + text, ("\ufeff" + text).encode("utf-16-le")]
    assert {digest(content) for content in same} == {digest(text)}
    assert digest(text.encode("cp1252"), encoding="cp1252") == digest(text)


def test_the_plays_match_the_counts_in_their_readme():
    plays = Path(data.text.__file__).parent / "plays"
    corpus, _ = load(str(plays))
    counts = (
        f"{corpus.characters:,} characters, all ASCII, {len(corpus.tokenizer)} of them distinct"
    )
    assert counts in (plays / "README.md").read_text()


def test_the_vocabulary_comes_from_the_whole_text():
    corpus, _ = load(write("book.txt", TEXT + "Ω"))
    assert "Ω" in corpus.tokenizer.vocabulary
    assert "Ω" not in corpus.tokenizer.decode(corpus.train.ids[: len(corpus.train)])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_selects_the_encoding_and_only_the_first_is_removed(encoding):
    text = "\ufeffΝαι, 🙂! The quick brown fox jumps over the lazy dog.\n" * 20
    for name in "ab":
        write(f"folder/{name}.txt", f"\ufeff{text}".encode(encoding))
    train, val = parts_of(load("folder", val_fraction=0.5)[0])
    half = len(text) // 2
    assert train + val == text[:half] * 2 + text[half:] * 2


def test_line_ends_become_newlines_as_in_the_text_mode_of_python():
    text = "a\r\nb\rc\n\r\n\x85d\u2028e\x0cf\r\r\n" * 10
    corpus, lines = load(write("book.txt", text))
    assert text_of(corpus) == Path("book.txt").read_text(encoding="utf-8")
    assert not any(r"\r" in line for line in lines)


def test_control_characters_are_preserved_and_counted():
    text = "a\tb\n" * 10 + "\0\x1b[2J\x1b\x85" + "more text " * 10
    corpus, lines = load(write("book.txt", text))
    assert text_of(corpus) == text
    assert lines[-1] == "note: control characters kept: U+0000 once, U+001B 2 times, U+0085 once"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "naïve café, £5: the quick brown fox jumps.\n"),
        ("utf-16-le", "naïve café, £5: the quick brown fox jumps.\n"),
        ("gb18030", "天地玄黄，宇宙\n"),
        ("shift-jis", "いろはにほへと\n"),
    ],
)
def test_data_encoding_applies_to_files_without_a_byte_order_mark(encoding, text):
    write("folder/a.txt", (text * 20).encode(encoding)), write("folder/b.txt", f"\ufeff{text * 20}")
    assert set(text_of(load("folder", encoding=encoding)[0])) == set(text)


def test_rare_characters_are_mapped_to_unk_counted_and_listed():
    text = TEXT + "é🙂🙂éx\ufffd"
    corpus, lines = load(write("book.txt", text), min_count=3)
    assert text_of(corpus) == TEXT + "\ufffd" * 6
    assert corpus.tokenizer.vocabulary == "".join(sorted({*TEXT, "\ufffd"}))
    note = next(line for line in lines if "rare characters" in line)
    assert note == (
        "note: 3 rare characters mapped to '\ufffd' (U+FFFD), 5 times in all: "
        "'x' (U+0078), 'é' (U+00E9), '🙂' (U+1F642)"
    )
    # a resumed run
    resumed, _ = load("book.txt", min_count=3, vocabulary=corpus.tokenizer.vocabulary)
    assert np.array_equal(resumed.train.ids, corpus.train.ids)
    # without rare characters
    assert "\ufffd" not in load(write("book.txt"), min_count=2)[0].tokenizer.vocabulary
    message = error_message(DataError, "book.txt", min_count=10**6)
    assert message.startswith(
        "book.txt: nothing to learn: '\ufffd' (U+FFFD) is the only character that occurs"
    )


def test_the_summary_lists_counts_split_rarest_characters_and_notes():
    write("folder/a.txt", "hello\x01 world\n" * 50 + "ö"), write("folder/b.txt", "Ωω\n" * 100)
    _, lines = load("folder", val_fraction=0.05)
    assert lines == [
        "text        folder: 2 files, 952 characters, 13 distinct",
        "split       904 characters to train on, 48 (5.0%) to validate on: "
        "the last 5% of each of 2 files",
        r"rarest      'ö' (U+00F6) once, '\x01' (U+0001) 50 times, ' ' (U+0020) 50 times",
        "note: control characters kept: U+0001 50 times",
        "note: 1 character only in the validation text, once: 'ö' (U+00F6)",
    ]


def test_validation_text_that_stands_in_the_training_text_too_is_noted():
    lines = [f"Line {number}, and {number * 37 % 101}.\n" for number in range(2000)]
    assert not any("twice" in line for line in load(write("once.txt", "".join(lines)))[1])
    (note,) = (line for line in load(write("book.txt", "".join(lines) * 2))[1] if "twice" in line)
    assert note.startswith("note: 20 of 20 pieces of the validation text, of 200 characters each,")


@pytest.mark.parametrize("source", ["folder/a.txt", "folder"])
def test_the_training_text_is_refused_as_validation_text(source):
    write("folder/a.txt", "abc" * 100)
    message = error_message(DataError, source, val_sources=["*/a.txt"])
    assert message.startswith("data.val_sources: ")
    assert "is the same text as data.sources" in message


@pytest.mark.parametrize(
    ("parameters", "characters", "preset"),
    [
        (3_000_000, 50_000, "mytext_small"),
        (10_000, 2_000_000, "mytext"),
        (20_000_000, 1_000_000, "mytext"),
        (500_000, 40_000_000, "mytext_gpu"),
        (800_000, 1_115_394, None),
        (10_700_000, 1_115_394, None),
    ],
)
def test_a_model_of_unsuitable_size_gets_advice_with_a_preset(parameters, characters, preset):
    line = data.summary.size_advice(parameters, characters)
    assert line is None if preset is None else line.endswith(f"; use configs/{preset}.yaml")


# Invalid texts


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        (b"first\nsecond caf\xe9\n", "utf-8", "UTF-8 at byte 16 (line 2); 1 of 18 bytes"),
        (b"a\r\nb\rcaf\xe9 \xe0\xe8\n", "utf-8", "UTF-8 at byte 8 (line 3); 3 of 13 bytes"),
        (b"\xef\xbb\xbfone\ntwo\nthree \xff", "utf-8", "UTF-8 at byte 17 (line 3); 1 of 18 bytes"),
        (b"abc\xe2\x82", "utf-8", "UTF-8 at byte 3 (line 1); 2 of 5 bytes"),  # cut in a character
        ("\ufeffa\nbc".encode("utf-16-le") + b"x", "utf-8", "UTF-16 at byte 10 (line 2); 1 of 11"),
        (
            "いろは\n".encode("shift-jis") + b"\xff",
            "shift-jis",
            "SHIFT-JIS at byte 7 (line 2); 1 of",
        ),
    ],
)
def test_bytes_in_another_encoding_are_reported_with_place_count_and_remedies(
    content, encoding, expected
):
    message = error_message(DataError, write("book.txt", content), encoding=encoding)
    assert message.startswith(f"book.txt: not {expected}")
    assert "--data.encoding=cp1252 (Western), cp1251 (Cyrillic)" in message
    assert "(Chinese), shift-jis (Japanese), euc-kr (Korean)" in message
    assert "the file is damaged: iconv -c -f UTF-" in message or encoding == "shift-jis"


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_an_empty_text_is_an_error_even_if_another_source_follows(content):
    message = error_message(DataError, write("book.txt", content), write("other.txt"))
    assert message.startswith("book.txt: the text is empty; use a longer text")


@pytest.mark.parametrize("vocabulary", [None, "no"])
def test_a_text_with_one_distinct_character_is_rejected(vocabulary):
    message = error_message(DataError, write("book.txt", "o" * 1000), vocabulary=vocabulary)
    assert message.startswith("book.txt: nothing to learn: 'o' (U+006F)")


STRANGE = {  # what "strange.txt" is: how to make it, and the message
    "a dangling link": (lambda: os.symlink("nowhere", "strange.txt"), "No such file or directory"),
    "a folder without text": (lambda: write("strange.txt/README.md"), "contains no text"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_invalid_source_is_an_error_even_if_another_source_follows(name):
    make, expected = STRANGE[name]
    make()
    message = error_message(DataError, "strange.txt", write("other.txt"))
    assert message.startswith("strange.txt") and expected in message


@pytest.mark.parametrize(
    "source",
    [
        "",
        "a\0b",
        "http://example.org/corpus/input.txt#sha256=" + "0" * 64,
        "file:///etc/corpus/passwd#sha256=" + "0" * 64,
        "https://example.org/corpus/input.txt",
        "https://example.org/corpus/input.txt#sha256=123",
        "https://example.org/input.txt#sha256=" + "0" * 64,
        "https://example.org/../input.txt#sha256=" + "0" * 64,
        "https://example.org/.git/input.txt#sha256=" + "0" * 64,
        "https://example.org/a\\b/input.txt#sha256=" + "0" * 64,
    ],
)
def test_a_malformed_source_is_rejected_by_the_settings(source):
    with pytest.raises(ConfigError) as raised:
        DataConfig(sources=("book.txt", source))
    assert printed(raised.value).startswith("sources")


# Choice of the source


def test_a_relative_source_is_looked_for_here_and_then_beside_the_code(folder, monkeypatch):
    monkeypatch.setattr(data.text, "ROOT", folder / "code")
    write("code/data/book.txt", "beside the code " * 9), write("code/data/a/b.md", "pattern " * 9)
    assert text_of(load("data/book.txt")[0]) == "beside the code " * 9
    assert text_of(load("data/**/*.md")[0]) == "pattern " * 9
    write("data/book.txt", "in the current folder " * 9)
    assert text_of(load("data/book.txt")[0]) == "in the current folder " * 9


def test_the_first_available_source_is_used_and_the_unavailable_ones_are_listed():
    write("b/input.txt"), write("c.txt", "other text " * 20)
    corpus, lines = load("a.txt", "b/nothing", "b/input.txt/under", "b/input.txt", "c.txt")
    assert corpus.name == "b"
    assert lines[0] == f"text        b/input.txt: {len(TEXT)} characters, {len(set(TEXT))} distinct"
    assert lines[-2:] == [
        "note: losses on b and a.txt are not comparable",
        "note: not available: a.txt (no such file or folder), b/nothing (no such file or folder), "
        "b/input.txt/under (no such file or folder)",
    ]


def test_without_any_available_source_the_error_lists_each_with_its_reason():
    message = error_message(DataError, "a.txt", "b\x1b[2J")
    assert message.startswith(
        r"data.sources: no text is available: a.txt (no such file or folder), "
        r"b\x1b[2J (no such file or folder); "
    )


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("books/austin.txt", "did you mean books/austen.txt?"),
        ("nowhere/austen.txt", "name an existing file, folder or address"),
    ],
)
def test_the_error_for_a_mistyped_source_suggests_the_most_similar_name(source, hint):
    write("books/austen.txt"), write("books/other.txt")
    assert error_message(DataError, source).endswith(f"; {hint}")


def test_the_name_of_a_corpus_is_its_file_or_folder():
    write("data/mine/input.txt"), write("book.txt")
    assert load("data/mine/input.txt")[0].name == "mine"
    assert load("./book.txt")[0].name == "book.txt"
    assert load(".")[0].name == Path.cwd().name


# Resumed runs


@pytest.mark.parametrize("name", ["a.txt", "b.txt"])
def test_a_resumed_run_finds_its_text_by_digest_in_any_source(name):
    texts = {"a.txt": "another text " * 20, "b.txt": TEXT, "c.txt": "a third text " * 20}
    sources = [write(*item) for item in texts.items()]
    text_sha256 = sha256(texts[name].encode())
    corpus, _ = load("missing.txt", *sources, sha256s=(text_sha256, None))
    assert corpus.name == name and text_of(corpus) == texts[name]


# Splits and sizes


@pytest.mark.parametrize(
    ("length", "fraction", "val"),
    [(20, 0.1, 2), (21, 0.1, 3), (12_345, 0.1, 1235), (1000, 0.3, 300), (1000, 0.001, 1)],
)
def test_val_fraction_of_each_file_rounded_up_is_validation_text(length, fraction, val):
    first, second = "a" * (length - 1) + "\n", "b" * (length - 1) + "\n"
    write("folder/a.txt", first), write("folder/b.txt", second)
    train, held_out = parts_of(load("folder", val_fraction=fraction)[0])
    cut = length - val
    assert train == first[:cut] + second[:cut] and held_out == first[cut:] + second[cut:]


def test_val_sources_gives_a_separate_validation_text():
    write("books/a.txt", "aaab" * 50), write("books/b.txt", "abab" * 50)
    write("val.txt", "abac" * 20)
    corpus, lines = load("books", val_sources=["missing.txt", "val.txt"])
    assert parts_of(corpus) == ["aaab" * 50 + "\n" + "abab" * 50 + "\n", "abac" * 20]
    assert corpus.tokenizer.vocabulary == "\nabc"
    assert corpus.val_sha256 == sha256(b"abac" * 20) and corpus.sha256 == load("books")[0].sha256
    assert lines[1] == "validation  val.txt: 80 characters, 3 distinct"
    assert {
        "note: 1 character only in the validation text, 20 times: 'c' (U+0063)",
        "note: losses on val.txt and missing.txt are not comparable",
        "note: not available: missing.txt (no such file or folder)",
    } <= set(lines)
    message = error_message(
        CheckpointError, "books", val_sources=["val.txt"], sha256s=(None, sha256(b"other"))
    )
    assert message.startswith("data.val_sources: the text has changed since the checkpoint")
    message = error_message(DataError, "books", val_sources=["missing.txt"])
    assert message.startswith("data.val_sources: no text is available")


def test_a_text_that_is_shorter_than_the_context_is_noted_and_one_without_a_prediction_refused():
    corpus, _ = load(write("book.txt", "abcdefghijklmnopqrst"))
    note = data.summary.length_advice(corpus.train, corpus.val, block_size=64)
    assert "--block_size=17 " in note
    assert data.summary.length_advice(corpus.train, corpus.val, block_size=17) is None
    message = error_message(DataError, write("tiny.txt", "abcdefghi"))
    assert message.startswith("tiny.txt: 1 character of validation text; at least 2 are needed")


# Downloads, from a local server that uses plain HTTP although the addresses are https


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []
        self.closing = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Answers /BEHAVIOUR/... as the method with that name does."""

    def do_GET(self):
        self.server.requests.append(self.path)
        getattr(self, self.path.split("/")[1])()

    def respond(self, content, length=None, code=200, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def complete(self):
        self.respond(TEXT.encode())

    def missing(self):
        self.respond(b"not here", code=404)

    def portal(self):
        self.respond(b"<html>Please log in to use this network</html>")

    def partial(self):
        self.respond(TEXT.encode()[:-10], length=len(TEXT))

    def nonsense(self):
        self.wfile.write(b"\0\1\2" * 5000 + b"\r\n\r\n")

    def stalled(self):
        self.respond(TEXT.encode()[:100], length=len(TEXT))
        self.server.closing.wait(20)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(
        HTTPSHandler, "https_open", lambda self, request: self.do_open(HTTPConnection, request)
    )
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield server
        server.closing.set()
        server.shutdown()


def address(server, behaviour, content=TEXT):
    place = f"127.0.0.1:{server.server_port}/{behaviour}/corpus/input.txt"
    return f"https://{place}#sha256={sha256(content.encode())}"


def files_in(folder):
    return sorted(
        str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://a.org/shakespeare/input.txt", "shakespeare"),
        ("https://a.org/master/novel.txt", "novel"),
        ("https://a.org/master/war.and.peace.txt", "war.and.peace"),
        ("https://a.org/b/input", "b"),
    ],
)
def test_a_download_is_stored_under_the_name_of_its_file(url, name):
    source = f"{url}#sha256={'0A' * 32}"
    path = data.text.path_of(source)
    assert path == Path("data", name, "input.txt") and data.text.name_of(path) == name


def test_a_text_is_downloaded_once_and_stored_in_data(server, folder, capfd):
    source = address(server, "complete")
    corpus, lines = load("data/corpus/input.txt", source, write("other.txt", "other " * 20))
    assert text_of(corpus) == TEXT and corpus.name == "corpus"
    assert lines[0].startswith("text        data/corpus/input.txt: ")
    assert lines[-1] == "note: not available: data/corpus/input.txt (no such file or folder)"
    assert files_in(folder) == ["data/corpus/input.txt", "other.txt"]
    for again in ("data/corpus/input.txt", source):
        assert load(again)[0].sha256 == corpus.sha256
    assert len(server.requests) == 1 and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("writable", [True, False])
def test_a_download_goes_beside_the_code_if_that_is_writable(server, folder, writable, monkeypatch):
    monkeypatch.setattr(data.text, "ROOT", folder / "code")
    (folder / "code" / "data").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    corpus, _ = load(address(server, "complete"))
    stored = "code/data/corpus/input.txt" if writable else "data/corpus/input.txt"
    assert text_of(corpus) == TEXT and files_in(folder) == [stored]
    corpus, _ = load(address(server, "missing"))  # found, so nothing is downloaded
    assert text_of(corpus) == TEXT


FAILURES = {  # behaviour of the server: reason in the message
    "missing": "HTTP Error 404: Not Found",
    "portal": "wrong SHA-256: 46 bytes with ",
    "partial": "",  # the system's words
    "nonsense": r"\x00\x01\x02",
    "stalled": "timed out",
}


@pytest.mark.parametrize("behaviour", FAILURES)
def test_a_failed_download_leaves_no_files_and_the_next_source_is_used(
    behaviour, server, folder, monkeypatch
):
    monkeypatch.setattr(data.text, "TIMEOUT", 0.5)
    write("plays/a.txt", "other text " * 20)
    corpus, lines = load(address(server, behaviour), "plays")
    assert corpus.name == "plays"
    reason = next(line for line in lines if line.startswith("note: not available: "))
    assert f"/{behaviour}/corpus/input.txt (" in reason and FAILURES[behaviour] in reason
    assert "()" not in reason and len(reason) < 1200
    assert "note: losses on plays and corpus are not comparable" in lines
    assert files_in(folder) == ["plays/a.txt"]


def test_without_another_source_the_error_gives_the_reason_of_the_system(server):
    url = address(server, "complete")
    server.shutdown()
    server.server_close()
    refused = f"[Errno {errno.ECONNREFUSED}] {os.strerror(errno.ECONNREFUSED)}"
    assert f"/corpus/input.txt ({refused}); " in error_message(DataError, url)


def test_a_download_that_cannot_be_stored_leaves_no_files(server, folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    message = error_message(DataError, address(server, "complete"))
    assert "cannot be stored at data/corpus/input.txt: No space left on device" in message
    assert files_in(folder) == []


def test_a_resumed_run_tries_downloads_last(server):
    write("mine.txt", "my own text " * 20), write("other.txt", "other text " * 20)
    source = address(server, "complete")
    mine = sha256(b"my own text " * 20), None
    assert load(source, "mine.txt", sha256s=mine)[0].name == "mine.txt"
    assert server.requests == []
    downloaded = sha256(TEXT.encode()), None
    assert load("other.txt", source, sha256s=downloaded)[0].name == "corpus"
    assert server.requests == ["/complete/corpus/input.txt"]
    error_message(CheckpointError, source, "other.txt", sha256s=(sha256(b"x"), None))
