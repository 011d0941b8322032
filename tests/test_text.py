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
from data.text import find_text
from tests.runs import raised
from tests.texts import TEXT, error_message, write

OTHER = "another text\n" * 20


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty working folder; nothing is beside the code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text, "ROOT", tmp_path / "no code here")
    return tmp_path


def find(*sources: str, expected: str | None = None, **settings) -> text.Text:
    return find_text(DataConfig(sources=sources, **settings), "sources", expected, list_unused=True)


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


def test_the_first_available_source_is_used_and_notes_name_the_others():
    write("b/input.txt"), write("c.txt", OTHER)
    found = find("a.txt", "b/input.txt", "c.txt", "d.txt")
    assert found.name == "b"
    comparable, unavailable, unused = found.notes
    assert comparable == "losses on b and a.txt are not comparable"
    assert unavailable == "not available: a.txt (no such file or folder)"
    assert unused.startswith("not used: c.txt; ")  # only of sources that were given as options
    assert len(find_text(DataConfig(sources=("b/input.txt", "c.txt")), "sources").notes) == 0


def test_a_source_that_is_not_used_cannot_end_the_run():
    write("book.txt"), write("images/a.png")
    (note,) = find("book.txt", "images").notes
    assert note.startswith("not used: images; ")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("books/austin.txt", "no such file or folder); did you mean books/austen.txt?"),
        ("books/*.md", "nothing matches); name an existing file or folder, or a URL"),
    ],
)
def test_without_an_available_source_the_nearest_name_is_suggested(source, hint):
    write("books/austen.txt")
    expected = f"no text is available: a.txt (no such file or folder), {source} ({hint}"
    assert error_message(DataError, "a.txt", source) == f"data.sources: {expected}"


STRANGE = {  # what "strange.txt" is: how to make it, and the message
    "a dangling link": (lambda: os.symlink("nowhere", "strange.txt"), "No such file or directory"),
    "a folder without text": (lambda: write("strange.txt/README.md"), "contains no text"),
    "empty": (lambda: write("strange.txt", b"\xef\xbb\xbf"), "the text is empty"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_invalid_source_is_an_error_even_if_another_source_follows(name):
    make, expected = STRANGE[name]
    make()
    message = error_message(DataError, "strange.txt", write("other.txt"))
    assert message.startswith("strange.txt: ") and expected in message


@pytest.mark.parametrize("end", ["", "#sha256=123", "/.git/input.txt#sha256=" + "0" * 64])
def test_a_url_needs_the_sha256_of_its_bytes_and_a_plain_name(end):
    with pytest.raises(ConfigError, match=r"^sources"):
        DataConfig(sources=("book.txt", f"https://example.org/corpus/input.txt{end}"))


@pytest.mark.parametrize("name", ["a.txt", "b.txt"])
def test_a_resumed_run_finds_its_text_by_digest_in_any_source(name):
    sources = [write("a.txt", OTHER), write("b.txt"), write("c.txt", "a third text\n")]
    wanted = find(name).sha256
    found = find("missing.txt", *sources, expected=wanted)
    assert found.name == name and "comparable" not in str(found.notes)  # it is the same text
    message = error_message(CheckpointError, *sources, sha256s=(digest("x"), None))
    assert message.startswith("data.sources: the text has changed since the checkpoint")


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
    ],
)
def test_a_file_that_is_not_utf8_is_refused_with_byte_line_count_and_remedies(
    content, encoding, expected
):
    message = error_message(DataError, write("book.txt", content), encoding=encoding)
    assert message.startswith(f"book.txt: not {expected}")
    assert "name the encoding: --data.encoding=cp1252 (Western), " in message


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
def test_a_failed_download_leaves_no_files_and_the_next_source_is_used(
    answer, reason, network, folder
):
    network.answer = answer
    found = find(SOURCE, write("plays/a.txt"))
    assert found.name == "a.txt" and files_in(folder) == ["plays/a.txt"]
    assert found.notes[0] == "losses on a.txt and corpus are not comparable"
    assert f"{URL} ({reason}" in found.notes[1]
    # it is an error only if no source is left
    assert f"{URL} ({reason}" in error_message(DataError, SOURCE)


def test_a_download_that_cannot_be_stored_leaves_no_files(network, folder, monkeypatch):
    monkeypatch.setattr(os, "replace", raised(OSError(28, "No space left on device")))
    message = error_message(DataError, SOURCE)
    assert "cannot be stored at data/corpus/input.txt: No space left on device" in message
    assert files_in(folder) == []
