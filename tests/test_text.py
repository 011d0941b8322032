"""Texts: where they are found, how their bytes are read, and downloads."""

import io
import os
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from common.errors import CheckpointError, ConfigError, DataError
from configs.schema import DataConfig
from data import text
from data.encodings import without_license
from data.text import find_text
from tests.runs import raised
from tests.texts import TEXT, error_message, load, write

OTHER = "another text\n" * 20


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder; nothing is beside the code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text, "ROOT", tmp_path / "no code here")
    return tmp_path


def find(*sources: str, expected: str | None = None, **settings) -> text.Text:
    return find_text(DataConfig(sources=sources, **settings), "sources", expected)


def digest(content: str) -> str:
    return sha256(content.encode()).hexdigest()


# ------------------------------------------------------------------------------------ what is found


def test_the_files_of_a_folder_or_pattern_are_joined_in_the_order_of_their_names():
    write("books/b.txt", "b"), write("books/a.TXT", "a"), write("books/more/input.txt", "c")
    write("books/notes.md", "x"), write("books/.hidden.txt", "x")
    os.symlink("b.txt", "books/link.txt")  # the same file
    assert find("books").contents == ["a", "b"]
    assert find("books/**/**/*.txt").contents == ["b", "c"]
    assert find("books/more/../more/input.txt").name == "more"


def test_a_relative_source_is_looked_for_here_and_then_beside_the_code(folder, monkeypatch):
    monkeypatch.setattr(text, "ROOT", folder / "code")
    write("code/data/book.txt", "beside the code")
    assert find("data/book.txt").contents == find("data/*.txt").contents == ["beside the code"]
    assert find(write("data/book.txt", "here")).contents == ["here"]


def test_all_sources_are_read_in_the_order_given_and_a_file_that_two_reach_once():
    write("b.txt", "b"), write("books/c.txt", "c"), write("books/a.txt", "a"), write("d.md", "d")
    found = find("d.md", "b.txt", "books", "books/c.txt", "./b.txt")
    assert found.contents == ["d", "b", "a", "c"]
    assert found.name == found.path == "d.md, and 4 more"


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("USERPROFILE", str(folder / "home"))
    write("home/book.txt", "at home")
    assert find("~/book.txt").contents == find("~/*.txt").contents == ["at home"]


def test_a_missing_source_is_an_error_and_the_nearest_name_is_suggested():
    write("books/austen.txt")
    assert error_message(DataError, "books/austen.txt", "books/austin.txt") == (
        "books/austin.txt: no such file or folder; did you mean books/austen.txt?"
    )
    assert "nothing matches; name an existing file" in error_message(DataError, "books/*.md")


def test_a_folder_says_what_of_it_is_not_read():
    write("notes/one.txt"), write("notes/.git/a.txt"), write("notes/.b.md"), write("notes/c.md")
    assert find("notes").notes == []  # no more than the texts
    for name in ("d.MD", "e.MD", "f.MD", "Makefile", "README"):
        write(f"notes/{name}")
    note = "not read: 3 .MD, 2 other, 1 .md; 'notes/**/*.MD' reads those"
    assert find("notes").notes == [note]
    for name in ("two", "three", "four", "five", "six", "more/seven"):
        write(f"notes/{name}.txt")
    note = "not read: 3 .MD, 2 other, 1 .md, 1 folder; 'notes/**/*.txt' reads those"
    assert f"note: {note}" in load("notes").summary


def test_a_part_of_a_path_that_exists_as_it_is_written_is_no_pattern(folder):
    write("[Group] Show*/1.srt", "1"), write("[Group] Show*/more [2]/2.srt", "2"), write("G/3.srt")
    for source in ("[Group] Show*/*.srt", f"{folder}/[Group] Show*/[1].*"):
        assert find(source).contents == ["1"], source
    assert find("[Group] Show*/**/*.srt").contents == ["1", "2"]
    assert find("[Group]/*.srt").contents == [TEXT]  # a letter of the group


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: os.symlink("nowhere", "strange.txt"), "No such file or directory"),
        (lambda: os.mkdir("strange.txt"), "contains no text; the texts of a folder"),
        (lambda: write("strange.txt/README.md"), "not read: 1 .md; 'strange.txt/**/*.md' reads"),
        (lambda: write("strange.txt", b"\xef\xbb\xbf"), "the text is empty"),
    ],
)
def test_an_invalid_source_is_an_error(make, expected):
    make()
    message = error_message(DataError, "strange.txt")
    assert message.startswith("strange.txt: ") and expected in message


@pytest.mark.parametrize("end", ["", "#sha256=123"])
def test_a_url_needs_the_sha256_of_its_bytes_and_a_plain_name(end):
    with pytest.raises(ConfigError, match=r"^sources"):
        DataConfig(sources=("book.txt", f"https://example.org/corpus/input.txt{end}"))


def test_the_digest_is_of_characters_and_file_borders_not_of_bytes_or_names():
    write("a/1.txt", "abc"), write("a/2.txt", "de"), write("b/1.txt", "ab"), write("b/2.txt", "cde")
    write("c/8.txt", "abc"), write("c/9.txt", "de")
    assert find("a").sha256 == find("c").sha256
    assert find("a").sha256 not in (find("b").sha256, find("a/1.txt").sha256)
    line = "naïve\ncafé\n"
    for content in (line.replace("\n", "\r\n"), f"\ufeff{line}".encode("utf-16-le")):
        assert find(write("line.txt", content)).sha256 == digest(line)


# ------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_selects_the_encoding_and_only_the_first_is_removed(encoding):
    line = "\ufeffΝαι, 🙂!\n"
    write("book.txt", f"\ufeff{line}".encode(encoding))
    assert find("book.txt", encoding="cp1252").contents == [line]


def test_line_ends_become_newlines_as_in_the_text_mode_of_python():
    write("book.txt", "a\r\nb\rc\n\r\n\x85d\u2028e\x0cf\r\r\n")
    assert find("book.txt").contents == [Path("book.txt").read_text(encoding="utf-8")]


def test_a_file_that_is_not_utf_8_is_refused_with_byte_line_count_and_remedies():
    message = error_message(DataError, write("book.txt", b"a\r\nb\rcaf\xe9 \xe0\xe8\n"))
    assert message.startswith("book.txt: not UTF-8 at byte 8 (line 3); 3 of 13 bytes")
    assert "name its encoding: --data.encoding=cp1252 (Western), " in message
    message = error_message(DataError, write("book.txt", b"\xef\xbb\xbfone\ntwo\nthree \xff"))
    assert message.startswith("book.txt: not UTF-8 at byte 17 (line 3); 1 of 18 bytes")
    assert "the file is damaged: iconv -c -f UTF-8 " in message


def test_files_in_another_encoding_are_counted_in_one_message():
    for number in range(40):
        write(f"many/{number:02}.txt", b"\n\xe9t\xe9" if number % 5 == 0 else b"a summer\n")
    message = error_message(DataError, "many")
    assert message.startswith("8 of 40 files are not UTF-8: many/00.txt (byte 1, line 2), many/05")
    assert "and 3 more; name its encoding: --data.encoding=cp1252" in message


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        ("Ein Satz.\n".encode("utf-16-be"), "cp1252", "(NUL characters); name its encoding: "
         "--data.encoding=utf-16be"),
        (b"one\0two three four", "utf-8", "(NUL characters); convert it to text first"),
        (rb"one \ud800 two", "unicode_escape", "(surrogates); name its encoding: "),
    ],
)  # fmt: skip
def test_what_decodes_to_nul_characters_or_surrogates_is_refused(content, encoding, expected):
    message = error_message(DataError, write("book.txt", content), encoding=encoding)
    assert message.startswith(f"book.txt: is not a text {expected}")


@pytest.mark.parametrize("start", [b"%PDF-1.7\n", b"PK\x03\x04", b"\x1f\x8b\x08\0", b"\x89PNG\0"])
def test_a_file_that_is_no_text_is_refused_without_proposing_an_encoding(start):
    message = error_message(DataError, write("book.pdf", start + b"\xe2\xe3\xcf\xd3" * 9))
    assert message.startswith("book.pdf: not UTF-8 at byte ")
    assert message.endswith(" bytes cannot be decoded; convert it to text first")


def test_a_book_of_project_gutenberg_is_read_without_its_license():
    def mark(word):
        return f"*** {word} OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n"

    book = f"A license.\n{mark('START')}One.\nTwo.\n{mark('END')}A longer license.\n"
    old = mark("START").replace("THE", "THIS").replace("*** S", "***S") + f"Old.\n{mark('END')}x\n"
    for content, kept in {
        book + old: "One.\nTwo.\nOld.\n",  # pair by pair
        f"{mark('START')}a\n{mark('START')}b\n{mark('END')}": "b\n",
        f"See {mark('START')}a\n{mark('END')}": f"See {mark('START')}a\n{mark('END')}",
    }.items():
        assert without_license(content) == kept
    write("books/a.txt", book.replace("\n", "\r\n")), write("books/b.txt", old), write("b/c.txt")
    assert find("books", "b").contents == ["One.\nTwo.\n", "Old.\n", TEXT]
    left_out = len(book + old) - len("One.\nTwo.\nOld.\n")
    note = f"note: {left_out} characters outside the marks of Project Gutenberg left out"
    assert note in load("books", "b").summary


# ---------------------------------------------------------------------------------------- downloads


class Network(list):
    """A network that gives one answer to every URL; a list of those that were asked for."""

    answer: bytes | Exception = TEXT.encode()

    def urlopen(self, url, timeout):
        self.append(url)
        if isinstance(self.answer, Exception):
            raise self.answer
        return io.BytesIO(self.answer)


@pytest.fixture
def network(monkeypatch):
    network = Network()
    monkeypatch.setattr(text, "urlopen", network.urlopen)
    return network


URL = "https://example.org/corpus/input.txt"
SOURCE = f"{URL}#sha256={digest(TEXT)}"


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("writable", [True, False])
def test_a_text_is_downloaded_once_beside_the_code_if_that_is_writable(
    network, folder, writable, monkeypatch
):
    monkeypatch.setattr(text, "ROOT", folder / "code")
    (folder / "code" / "data").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    for source in (SOURCE, SOURCE.replace("example", "mirror"), "data/corpus/input.txt"):
        found = find(source)
        assert found.contents == [TEXT] and found.name == "corpus"
    stored = "code/data/corpus/input.txt" if writable else "data/corpus/input.txt"
    assert files_in(folder) == [stored] and network == [URL]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HTTPError(URL, 404, "Not Found", {}, None), "HTTP Error 404: Not Found"),
        (b"<html>Please log in</html>", "wrong SHA-256: 26 bytes with "),
        (URLError(ConnectionRefusedError("refused")), "refused"),
    ],
)
def test_a_failed_download_leaves_no_files_and_the_fallback_stands_for_all_sources(
    answer, reason, network, folder
):
    network.answer = answer
    write("plays/a.txt"), write("other.txt", OTHER)
    found = find("other.txt", SOURCE, fallback="plays")
    assert found.name == "plays" and found.contents == [TEXT]
    assert files_in(folder) == ["other.txt", "plays/a.txt"]
    (note,) = found.notes
    assert note.startswith(f"{URL}: {reason}")
    assert note.endswith("; training on plays, losses on it are not comparable")
    message = error_message(DataError, SOURCE)
    assert message.startswith(f"{URL}: {reason}") and message.endswith("; name its file")


def test_a_run_is_resumed_on_the_text_that_it_was_begun_on_the_download_or_the_fallback(network):
    write("plays/a.txt", OTHER)
    offline = URLError(ConnectionRefusedError("refused"))
    network.answer = offline
    begun = find(SOURCE, fallback="plays").sha256
    network.answer = TEXT.encode()
    found = find(SOURCE, fallback="plays", expected=begun)
    assert found.contents == [OTHER] and not found.notes

    begun = find(SOURCE, fallback="plays").sha256
    assert begun == digest(TEXT)
    Path("data/corpus/input.txt").unlink()
    network.answer = offline
    message = error_message(CheckpointError, SOURCE, fallback="plays", sha256s=(begun, None))
    assert message.startswith("data.sources: the text has changed since the checkpoint")
    assert f"found instead: {URL}: refused, plays is another text, SHA-256 " in message


def test_a_file_with_the_name_of_a_download_is_refused_if_it_is_another_text(network):
    path = write("data/corpus/input.txt", OTHER)
    message = error_message(DataError, SOURCE, fallback=write("plays/a.txt"))
    both = f"{path}: has SHA-256 {digest(OTHER)}, but {URL} has {digest(TEXT)}; delete the file to "
    assert message.startswith(both) and network == []


def test_a_download_that_cannot_be_stored_leaves_no_files(network, folder, monkeypatch):
    monkeypatch.setattr(os, "replace", raised(OSError(28, "No space left on device")))
    message = error_message(DataError, SOURCE)
    assert "cannot be stored at data/corpus/input.txt: No space left on device" in message
    assert files_in(folder) == []
