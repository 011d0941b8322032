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
from data.text import decode, find_text, without_license
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


@pytest.mark.parametrize(
    ("source", "name", "files"),
    [
        ("books/a.TXT", "a.TXT", "a"),
        ("books", "books", "ab"),  # no notes, hidden files or folders; a link is the same file
        ("books/**/**/*.txt", "books/**/**/*.txt", "bc"),
        ("books/[cm]*", "books/[cm]*", "m"),
        ("books/draft[1]*.md", "draft[1]*.md", "m"),
        ("books/more/../more/input.txt", "more", "c"),
        (".", "here", "h"),
    ],
)
def test_the_files_of_a_folder_or_pattern_are_joined_in_the_order_of_their_names(
    source, name, files, folder, monkeypatch
):
    write("here/books/b.txt", "b"), write("here/books/a.TXT", "a"), write("here/h.txt", "h")
    write("here/books/.hidden.txt", "x"), write("here/books/more/input.txt", "c")
    write("here/books/draft[1]*.md", "m"), write("here/books/draft1.md", "x")
    os.symlink("b.txt", "here/books/link.txt"), os.symlink("draft[1]*.md", "here/books/m.md")
    monkeypatch.chdir("here")
    found = find(source)
    assert (found.name, "".join(found.contents)) == (name, files)


def test_a_relative_source_is_looked_for_here_and_then_beside_the_code(folder, monkeypatch):
    monkeypatch.setattr(text, "ROOT", folder / "code")
    write("code/data/book.txt", "beside the code"), write("code/data/a/b.md", "pattern")
    assert find("data/book.txt").contents == ["beside the code"]
    assert find("data/**/*.md").contents == ["pattern"]
    assert find(write("data/book.txt", "here")).contents == ["here"]


def test_all_sources_are_read_in_the_order_given_and_a_file_that_two_reach_once():
    write("b.txt", "b"), write("books/c.txt", "c"), write("books/a.txt", "a"), write("d.md", "d")
    found = find("d.md", "b.txt", "books", "books/c.txt", "./b.txt")
    assert found.contents == ["d", "b", "a", "c"]
    assert found.name == found.path == "d.md, and 4 more"
    assert find("books/c.txt", "books").contents == ["c", "a"]
    (line, *_) = load("b.txt", "books", val_fraction=0.4).summary
    assert line == "text        b.txt, and 1 more: 3 files, 6 characters, 4 distinct"


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("USERPROFILE", str(folder / "home"))
    write("home/book.txt", "at home")
    assert find("~/book.txt").contents == find("~/*.txt").contents == ["at home"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("books/austin.txt", "no such file or folder; did you mean books/austen.txt?"),
        ("books/*.md", "nothing matches; name an existing file or folder, or a URL"),
    ],
)
def test_a_missing_source_is_an_error_and_the_nearest_name_is_suggested(source, message):
    write("books/austen.txt")
    assert error_message(DataError, "books/austen.txt", source) == f"{source}: {message}"


@pytest.mark.parametrize(
    ("others", "note"),
    [
        (["a.md", "b.MD", "c.png"], "2 .md, 1 .png; 'notes/**/*.md' reads those"),
        (["a.md", "b/c.txt", "d/e.txt"], "1 .md, 2 folders; 'notes/**/*.txt' reads those"),
        (["LICENSE", "Makefile"], "2 other; 'notes/**/*' reads those"),
        (["a.md", "b/.c.txt"], "1 .md, 1 folder; 'notes/**/*.txt' reads those"),
        (["a.md"], None),  # fewer than the texts
        ([".git/a", ".b.md", ".c.md"], None),  # hidden
    ],
)
def test_a_folder_says_what_of_it_is_not_read(others, note):
    for name in ("one.txt", *others):
        write(f"notes/{name}", name)
    found = find("notes")
    assert found.contents == ["one.txt"]
    assert found.notes == ([f"not read: {note}"] if note else [])
    if note:
        assert f"note: not read: {note}" in load(write("more.txt"), "notes").summary


def test_a_part_of_a_path_that_exists_as_it_is_written_is_no_pattern(folder):
    write("[Group] Show*/1.srt", "1"), write("[Group] Show*/more [2]/2.srt", "2"), write("G/3.srt")
    for source in ("[Group] Show*/*.srt", "[Group] Show*/[1].srt", f"{folder}/[Group] Show*/1.*"):
        assert find(source).contents == ["1"], source
    assert find("[Group] Show*/**/*.srt").contents == ["1", "2"]
    assert find("[Group]/*.srt").contents == [TEXT]  # a letter of the group


STRANGE = {  # what "strange.txt" is: how to make it, and the message
    "a dangling link": (lambda: os.symlink("nowhere", "strange.txt"), "No such file or directory"),
    "an empty folder": (lambda: os.mkdir("strange.txt"), "contains no text; the texts of a folder"),
    "a folder without text": (
        lambda: write("strange.txt/README.md"),
        "not read: 1 .md; 'strange.txt/**/*.md' reads those",
    ),
    "empty": (lambda: write("strange.txt", b"\xef\xbb\xbf"), "the text is empty"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_invalid_source_is_an_error(name):
    make, expected = STRANGE[name]
    make()
    message = error_message(DataError, "strange.txt")
    assert message.startswith("strange.txt: ") and expected in message


@pytest.mark.parametrize("end", ["", "#sha256=123", "/.git/input.txt#sha256=" + "0" * 64])
def test_a_url_needs_the_sha256_of_its_bytes_and_a_plain_name(end):
    with pytest.raises(ConfigError, match=r"^sources"):
        DataConfig(sources=("book.txt", f"https://example.org/corpus/input.txt{end}"))


def test_a_resumed_run_gets_the_text_of_its_digest_or_an_error():
    write("a.txt", OTHER), write("b.txt")
    assert find("b.txt", expected=digest(TEXT)).contents == [TEXT]
    message = error_message(CheckpointError, "a.txt", sha256s=(digest(TEXT), None))
    assert message.startswith("data.sources: the text has changed since the checkpoint")
    assert f"found instead: a.txt is another text, SHA-256 {digest(OTHER)}" in message


def test_the_digest_is_of_characters_and_file_borders_not_of_bytes_or_names():
    def digest_of(*contents, names="abc", **settings):
        folder = f"{names}{len(contents)}"
        for name, content in zip(names, contents, strict=False):
            write(f"{folder}/{name}.txt", content)
        return find(folder, **settings).sha256

    assert digest_of("abc", "de") == digest_of("abc", "de", names="xyz")
    others = [("ab", "cde"), ("de", "abc"), ("abc", "de", ""), ("abcde",)]
    assert digest_of("abc", "de") not in [digest_of(*contents) for contents in others]
    line = "naïve\ncafé\n"
    same = [line, line.replace("\n", "\r\n"), ("\ufeff" + line).encode("utf-16-le")]
    assert {digest_of(content) for content in same} == {digest(line)}
    assert digest_of(line.encode("cp1252"), encoding="cp1252") == digest(line)


# ------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_selects_the_encoding_and_only_the_first_is_removed(encoding):
    line = "\ufeffΝαι, 🙂!\n"
    write("book.txt", f"\ufeff{line}".encode(encoding))
    assert find("book.txt", encoding="cp1252").contents == [line]


def test_line_ends_become_newlines_as_in_the_text_mode_of_python():
    write("book.txt", "a\r\nb\rc\n\r\n\x85d\u2028e\x0cf\r\r\n")
    assert find("book.txt").contents == [Path("book.txt").read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        (b"a\r\nb\rcaf\xe9 \xe0\xe8\n", "utf-8", "UTF-8 at byte 8 (line 3); 3 of 13 bytes"),
        (b"\xef\xbb\xbfone\ntwo\nthree \xff", "utf-8", "UTF-8 at byte 17 (line 3); 1 of 18 bytes"),
        ("いろは\n".encode() + b"\xff", "shift-jis", "SHIFT-JIS at byte "),
        (b"\xff\xfea\0b", "utf-8", "UTF-16 at byte 4 (line 1); 1 of 5 bytes"),
        (b"a\xe2\x82", "utf-8", "UTF-8 at byte 1 (line 1); 2 of 3 bytes"),
        (b"\xff", "utf-8-sig", "UTF-8 at byte 0 (line 1); 1 of 1 bytes"),
        (b'"\xff', "utf-7", "UTF-7 at byte 1 (line 1); 1 of 2 bytes"),
    ],
)
def test_a_file_that_is_not_utf8_is_refused_with_byte_line_count_and_remedies(
    content, encoding, expected
):
    message = error_message(DataError, write("book.txt", content), encoding=encoding)
    assert message.startswith(f"book.txt: not {expected}")
    marked = content.startswith((b"\xff\xfe", b"\xef\xbb\xbf"))
    assert ("name its encoding: --data.encoding=cp1252 (Western), " in message) == (not marked)
    assert ("the file is damaged: iconv -c -f UTF-" in message) == marked
    with pytest.raises(DataError) as raised:  # a prompt: its command has no such option
        decode(content, "standard input", encoding)
    assert str(raised.value).startswith(f"standard input: not {expected}")
    assert "--data" not in str(raised.value)
    assert "iconv" in str(raised.value)


def test_files_in_another_encoding_are_counted_in_one_message():
    for number in range(40):
        write(f"many/{number:02}.txt", b"\xe9t\xe9 " * 4 if number % 5 == 0 else b"a summer\n")
    write("many/05.txt", b"\n" + b"winter " * 3 + b"\xe9")
    message = error_message(DataError, "many")
    assert message.startswith(
        "8 of 40 files are not UTF-8: many/00.txt (byte 0, line 1), many/05.txt (byte 22, line 2), "
        "many/10.txt (byte 0, line 1), many/15.txt (byte 0, line 1), many/20.txt (byte 0, line 1) "
        "and 3 more; name its encoding: --data.encoding=cp1252"
    )


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        ("Ein Satz.\n".encode("utf-16-le"), "utf-8", "(NUL characters); {utf-16le}"),
        ("Ein Satz.\n".encode("utf-16-be"), "cp1252", "(NUL characters); {utf-16be}"),
        ("Größe.\n".encode("utf-16-le"), "utf-8", "UTF-8 at byte 4 (line 1); 2 of 14 bytes"),
        ("Ein Satz.\n".encode("utf-32-le"), "utf-8", "(NUL characters); convert it to text first"),
        (b"one\0two three four", "utf-8", "(NUL characters); convert it to text first"),
        (rb"one \ud800 two", "unicode_escape", "(surrogates); name its encoding: "),
    ],
)
def test_what_decodes_to_nul_characters_or_surrogates_is_refused(content, encoding, expected):
    message = error_message(DataError, write("book.txt", content), encoding=encoding)
    expected = expected.replace("{", "name its encoding: --data.encoding=").replace("}", "")
    if "UTF-8" not in expected:
        expected = f"is not a text {expected}"
    else:
        assert message.endswith("; name its encoding: --data.encoding=utf-16le")
    assert expected in message
    # sample.py has no option for an encoding
    with pytest.raises(DataError) as raised:
        decode(content, "-", encoding)
    assert "--data" not in str(raised.value)


@pytest.mark.parametrize("start", [b"%PDF-1.7\n", b"PK\x03\x04", b"\x1f\x8b\x08\0", b"\x89PNG\0"])
def test_of_a_file_that_is_no_text_the_message_proposes_no_encoding(start):
    message = error_message(DataError, write("book.pdf", start + b"\xe2\xe3\xcf\xd3" * 9))
    assert message.startswith("book.pdf: not UTF-8 at byte ")
    assert message.endswith(" bytes cannot be decoded; convert it to text first")


def test_of_a_book_of_project_gutenberg_the_text_between_the_marks_is_read():
    def mark(word):
        return f"*** {word} OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n"

    book = f"A license.\n{mark('START')}One.\nTwo.\n{mark('END')}A longer license.\n"
    old = mark("START").replace("THE", "THIS").replace("*** S", "***S") + f"Old.\n{mark('END')}x\n"
    for content, kept in {
        book: "One.\nTwo.\n",
        book + old: "One.\nTwo.\nOld.\n",  # pair by pair
        f"{mark('START')}a\n{mark('START')}b\n{mark('END')}": "b\n",
        f"{mark('END')}a\n{mark('START')}b\n": f"{mark('END')}a\n{mark('START')}b\n",
        f"See {mark('START')}a\n{mark('END')}": f"See {mark('START')}a\n{mark('END')}",
        f"{mark('START')}a": f"{mark('START')}a",
    }.items():
        assert without_license(content) == kept
    (
        write("books/a.txt", book.replace("\n", "\r\n")),
        write("books/b.txt", old),
        write("books/c.txt"),
    )
    found = find("books")
    assert found.contents == ["One.\nTwo.\n", "Old.\n", TEXT]
    left_out = len(book + old) - len("One.\nTwo.\nOld.\n")
    assert found.notes == [f"{left_out} characters outside the marks of Project Gutenberg left out"]
    assert find("books/a.txt").sha256 == digest("One.\nTwo.\n")


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
    # it is for downloads only
    assert error_message(DataError, "missing.txt", fallback="plays").startswith("missing.txt: no ")


def test_a_run_that_was_begun_on_the_fallback_is_resumed_on_it_online_too(network):
    write("plays/a.txt", OTHER)
    network.answer = URLError(ConnectionRefusedError("refused"))
    begun = find(SOURCE, fallback="plays").sha256
    assert find(SOURCE, fallback="plays", expected=begun).contents == [OTHER]
    network.answer = TEXT.encode()
    found = find(SOURCE, fallback="plays", expected=begun)
    assert found.contents == [OTHER] and not found.notes


def test_a_run_that_was_begun_on_a_download_is_not_resumed_on_the_fallback(network, folder):
    write("plays/a.txt", OTHER)
    begun = find(SOURCE, fallback="plays").sha256
    assert begun == digest(TEXT)
    Path("data/corpus/input.txt").unlink()
    network.answer = URLError(ConnectionRefusedError("refused"))
    message = error_message(CheckpointError, SOURCE, fallback="plays", sha256s=(begun, None))
    assert f"found instead: {URL}: refused, plays is another text, SHA-256 " in message


def test_a_file_with_the_name_of_a_download_is_refused_if_it_is_another_text(network):
    path = write("data/corpus/input.txt", OTHER)
    message = error_message(DataError, SOURCE, fallback=write("plays/a.txt"))
    assert message == (
        f"{path}: has SHA-256 {digest(OTHER)}, but {URL} has {digest(TEXT)}; delete the file to "
        "download it again, or name it itself"
    )
    assert network == [] and find(path).contents == [OTHER]


def test_a_download_that_cannot_be_stored_leaves_no_files(network, folder, monkeypatch):
    monkeypatch.setattr(os, "replace", raised(OSError(28, "No space left on device")))
    message = error_message(DataError, SOURCE)
    assert "cannot be stored at data/corpus/input.txt: No space left on device" in message
    assert files_in(folder) == []
