"""Texts: where they are found, how their bytes are read, and downloads."""

import io
import os
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock
from urllib.error import HTTPError, URLError

import pytest

from common.errors import ConfigError, DataError
from configs.schema import DataConfig
from data import text
from data.encodings import strip_license
from data.text import find_text
from tests.conftest import printed
from tests.runs import raised
from tests.texts import TEXT, error_message, load, write

OTHER = "another text\n" * 20


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder; nothing is beside the code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text, "ROOT", tmp_path / "no code here")
    return tmp_path


def find(*sources: str, encoding: str = "utf-8", fallback: str = "") -> text.Text:
    return find_text(sources, encoding, fallback, "--sources")


def digest(content: str) -> str:
    return sha256(content.encode()).hexdigest()


# ------------------------------------------------------------------------------------ what is found


def test_the_files_of_a_folder_or_pattern_are_joined_in_the_order_of_their_names():
    write("books/b.txt", "b"), write("books/a.TXT", "a"), write("books/more/input.txt", "c")
    write("books/notes.md", "x"), write("books/.hidden.txt", "x")
    os.symlink("b.txt", "books/link.txt")  # the same file
    assert find("books").files == ["a", "b"]
    assert find("books/**/**/*.txt").files == ["b", "c"]
    assert find("books/more/../more/input.txt").name == "more"


def test_a_relative_source_is_looked_for_here_and_then_beside_the_code(folder, monkeypatch):
    monkeypatch.setattr(text, "ROOT", folder / "code")
    write("code/data/book.txt", "beside the code")
    assert find("data/book.txt").files == find("data/*.txt").files == ["beside the code"]
    assert find(write("data/book.txt", "here")).files == ["here"]


def test_all_sources_are_read_in_the_order_given_and_a_file_that_two_reach_once():
    write("b.txt", "b"), write("books/c.txt", "c"), write("books/a.txt", "a"), write("d.md", "d")
    found = find("d.md", "b.txt", "books", "books/c.txt", "./b.txt")
    assert found.files == ["d", "b", "a", "c"]
    assert found.name == found.path == "d.md, and 4 more"


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("USERPROFILE", str(folder / "home"))
    write("home/book.txt", "at home")
    assert find("~/book.txt").files == find("~/*.txt").files == ["at home"]


def test_a_folder_says_what_of_it_is_not_read_and_which_pattern_reads_it():
    write("notes/one.txt"), write("notes/.git/a.txt"), write("notes/.b.md"), write("notes/c.md")
    assert find("notes").notes == []  # no more than the texts
    for name in ("d.MD", "e.MD", "f.MD", "Makefile", "README", "img/a.png"):
        write(f"notes/{name}")
    note = 'not read: 3 .MD, 2 other, 1 .md, 1 folder; add --sources="notes/**/*.MD"'
    assert find("notes").notes == [note]
    assert f"note: {note}" in load("notes").summary
    val = load(write("book.txt", OTHER), val_sources=["notes"]).summary
    assert f"note: {note.replace('sources', 'val_sources')}" in val
    # what another source reads is not listed, and no folder, since the user knows what is there
    rest = 'not read: 2 other, 1 .md; add --sources="notes/**/*.md"'
    assert find("notes", "notes/**/*.MD").notes == [rest]
    # a name without a suffix has no pattern of its own: `**/*` would read the picture too
    write("plain/README"), write("plain/Makefile"), write("plain/one.txt")
    assert find("plain").notes == ["not read: 2 other"]
    write("texts/one.txt"), write("texts/more/two.txt")
    assert find("texts").notes == ['not read: 1 folder; add --sources="texts/**/*.txt"']


def test_links_below_a_pattern_are_not_followed_and_hidden_files_stay_out():
    write("a/1.txt", "1"), write("b/2.txt", "2"), write("b/.git/3.txt"), write("b/.4.txt")
    os.symlink("../b", "a/b"), os.symlink("../a", "b/a"), os.symlink(".", "a/a")
    for source in ("a/**", "a/**/*", "a/**/*.txt", "a/**.txt"):
        assert find(source).files == ["1"], source
    assert find("**/*.txt").files == find("*/[12].*").files == ["1", "2"]


def test_the_error_for_a_file_name_that_is_not_utf_8_says_so():
    for name in ("sources", "val_sources"):
        with pytest.raises(ConfigError) as raised:
            DataConfig(**{name: (os.fsdecode(b"caf\xe9.txt"),)})
        line = printed(raised.value)
        assert line == rf"{name}: ['caf\udce9.txt'] is not UTF-8; rename the file or folder"
    write("books/a.txt"), write(os.fsdecode(b"books/caf\xe9.txt"))
    assert find("books").files == [TEXT, TEXT]


def test_a_part_of_a_path_that_exists_as_it_is_written_is_no_pattern(folder):
    write("[Group] Show*/1.srt", "1"), write("[Group] Show*/more [2]/2.srt", "2"), write("G/3.srt")
    for source in ("[Group] Show*/*.srt", f"{folder}/[Group] Show*/[1].*"):
        assert find(source).files == ["1"], source
    assert find("[Group] Show*/**/*.srt").files == ["1", "2"]
    assert find("[Group]/*.srt").files == [TEXT]  # a letter of the group


@pytest.mark.parametrize(
    ("make", "source", "words"),
    [
        (lambda: write("austen.txt"), "austin.txt", "no such file or folder; did you mean austen."),
        (lambda: write("a/b.txt"), "a/*.md", "nothing matches; name an existing file"),
        (lambda: write("a.txt"), "a.txt,b.txt", "; to read several, give the option several times"),
        (lambda: os.symlink("nowhere", "a.txt"), "a.txt", "No such file or directory"),
        (lambda: os.mkdir("a"), "a", "contains no text; the texts of a folder are its .txt files"),
        (lambda: write("a/README.md"), "a", 'not read: 1 .md; name "a/**/*.md"'),
    ],
    ids=["mistyped", "no match", "comma", "broken link", "empty folder", "folder without texts"],
)
def test_a_source_that_cannot_be_read_is_an_error_beside_one_that_can_too(make, source, words):
    make()
    message = error_message(DataError, write("there.txt"), source)
    assert message.startswith(f"{source}: ") and words in message


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
    assert find("book.txt", encoding="cp1252").files == [line]


def test_line_ends_become_newlines_as_in_the_text_mode_of_python():
    write("book.txt", "a\r\nb\rc\n\r\n\x85d\u2028e\x0cf\r\r\n")
    assert find("book.txt").files == [Path("book.txt").read_text(encoding="utf-8")]


def test_a_file_that_is_not_utf_8_is_refused_with_byte_line_and_advice():
    message = error_message(DataError, write("book.txt", b"a\r\nb\rcaf\xe9 \xe0\xe8\n"))
    assert message.startswith(
        "book.txt: not UTF-8 at byte 8 (line 3); name the encoding: --encoding=cp1252 (Western), "
    )
    # behind a mark that says UTF-8, no other encoding is offered
    message = error_message(DataError, write("book.txt", b"\xef\xbb\xbfone\ntwo\nthree \xff"))
    assert message.startswith("book.txt: not UTF-8 at byte 17 (line 3); if it is damaged: ")


@pytest.mark.parametrize(
    ("others", "advice"),
    [
        ("a summer\n", "name the encoding: --encoding=cp1252 (Western), "),
        ("ein schöner Sommer\n", "convert to UTF-8: iconv -f cp1252 -t UTF-8 OLD > NEW"),
    ],
)
def test_files_in_another_encoding_are_counted_and_no_encoding_is_offered_if_others_are_utf_8(
    others, advice
):
    for number in range(40):
        write(f"many/{number:02}.txt", b"\n\xe9t\xe9" if number % 5 == 0 else others)
    message = error_message(DataError, "many")
    first = "many/00.txt: not UTF-8 at byte 1 (line 2), many/05.txt: "
    assert message.startswith(f"8 of 40 files cannot be read: {first}")
    assert f" and 3 more; {advice}" in message
    assert ("--encoding" in message) == others.isascii()


def test_files_that_are_valid_utf_8_though_another_encoding_was_named_get_a_note():
    write("ascii.txt"), write("marked.txt", "\ufeffschön"), write("other.txt", "schön")
    write("western.txt", "schön".encode("cp1252"))
    found = find("*.txt", encoding="cp1252")
    assert found.files[1] == found.files[3] == "schön"
    assert found.notes == ["read as CP1252, but valid UTF-8: other.txt"]


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        ("Ein Satz.\n".encode("utf-16-be"), "cp1252", "a NUL character in line 1; name the "
         "encoding: --encoding=utf-16be"),
        (b"one\r\ntwo\0three four", "utf-8", "a NUL character in line 2; remove it: "
         'tr -d "\\000" < OLD > NEW'),
        (b"PK\3\4\0", "cp1252", "a NUL character in line 1; convert it to text first"),
        (rb"one \ud800 two", "unicode_escape", "not UNICODE_ESCAPE: surrogates; name the enc"),
    ],
)  # fmt: skip
def test_what_decodes_to_nul_characters_or_surrogates_is_refused(content, encoding, expected):
    message = error_message(DataError, write("book.txt", content), encoding=encoding)
    assert message.startswith(f"book.txt: {expected}")


@pytest.mark.parametrize("start", [b"%PDF-1.7\n", b"PK\x03\x04", b"\x1f\x8b\x08\0", b"\x89PNG\0"])
def test_a_file_that_is_no_text_is_refused_without_proposing_an_encoding(start):
    message = error_message(DataError, write("book.pdf", start + b"\xe2\xe3\xcf\xd3" * 9))
    assert message.startswith("book.pdf: not UTF-8 at byte ")
    assert message.endswith("); convert it to text first")


def test_a_book_of_project_gutenberg_is_read_without_its_license():
    def mark(word):
        return f"*** {word} OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n"

    book = f"A license.\n{mark('START')}One.\nTwo.\n{mark('END')}A longer license.\n"
    old = mark("START").replace("THE", "THIS").replace("*** S", "***S") + f"Old.\n{mark('END')}x\n"
    wrapped = (mark("START") + "c\n" + mark("END")).replace("A BOOK", "A\nBOOK")
    unfinished = (mark("START") + "c\n\n***\n" + mark("END")).replace(" A BOOK ***", "")
    quoted = f"See {mark('START')}a\n{mark('END')}"
    for content, kept in {
        book + old: "One.\nTwo.\nOld.\n",  # pair by pair
        wrapped: "c\n",
        unfinished: "c\n\n***\n",  # a mark without its end does not take the text along
        quoted: quoted,
    }.items():
        assert strip_license(content) == kept
    write("books/a.txt", book.replace("\n", "\r\n")), write("books/b.txt", old), write("b/c.txt")
    assert find("books", "b").files == ["One.\nTwo.\n", "Old.\n", TEXT]
    left_out = len(book + old) - len("One.\nTwo.\nOld.\n")
    note = f"note: {left_out} characters outside the marks of Project Gutenberg left out"
    assert note in load("books", "b").summary


# ---------------------------------------------------------------------------------------- downloads


@pytest.fixture
def network(monkeypatch):
    """A network that answers TEXT to every URL."""
    urlopen = Mock(side_effect=lambda *_, **__: io.BytesIO(TEXT.encode()))
    monkeypatch.setattr(text, "urlopen", urlopen)
    return urlopen


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
        assert found.files == [TEXT] and found.name == "corpus"
    stored = "code/data/corpus/input.txt" if writable else "data/corpus/input.txt"
    assert files_in(folder) == [stored] and network.call_count == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HTTPError(URL, 404, "Not Found", {}, None), "HTTP Error 404: Not Found"),
        (b"<html>Please log in</html>", "wrong SHA-256: 26 bytes with "),
        (URLError(ConnectionRefusedError("refused")), "refused"),
        (ValueError("proxy URL with no authority: 'http:/proxy'"), "proxy URL with no authority"),
    ],
)
def test_a_failed_download_leaves_no_files_and_the_fallback_stands_for_all_sources(
    answer, reason, network, folder
):
    failed = isinstance(answer, Exception)
    network.side_effect = answer if failed else lambda *_, **__: io.BytesIO(answer)
    write("plays/a.txt"), write("other.txt", OTHER)
    found = find("other.txt", SOURCE, fallback="plays")
    assert found.name == "plays" and found.files == [TEXT]
    assert files_in(folder) == ["other.txt", "plays/a.txt"]
    (note,) = found.notes
    assert note.startswith(f"{URL}: {reason}")
    assert note.endswith("; training on plays, losses on it are not comparable")
    message = error_message(DataError, SOURCE)
    assert message.startswith(f"{URL}: {reason}") and message.endswith("; name its file")


def test_a_file_with_the_name_of_a_download_is_refused_if_it_is_another_text(network):
    path = write("data/corpus/input.txt", OTHER)
    message = error_message(DataError, SOURCE, fallback=write("plays/a.txt"))
    both = f"{path}: has SHA-256 {digest(OTHER)}, but {URL} has {digest(TEXT)}; delete the file to "
    assert message.startswith(both) and not network.called


def test_a_download_that_cannot_be_stored_leaves_no_files(network, folder, monkeypatch):
    monkeypatch.setattr(os, "replace", raised(OSError(28, "No space left on device")))
    message = error_message(DataError, SOURCE)
    assert "cannot be stored at data/corpus/input.txt: No space left on device" in message
    assert files_in(folder) == []
