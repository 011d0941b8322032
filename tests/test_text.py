"""Texts: which files are found, how their bytes are read, what is noted or refused; downloads."""

import io
import os
from hashlib import sha256
from unicodedata import normalize
from unittest.mock import Mock
from urllib.error import HTTPError

import pytest

from common.console import DataError
from data import text
from tests.texts import TEXT, error_message, load, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder; the code is in its folder `code`, and `home` is the home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.files.ROOT", tmp_path / "code")
    monkeypatch.setattr("data.text.ROOT", tmp_path / "code")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def find(*sources, encoding="utf-8", fallback=""):
    return text.read_text(sources, encoding, fallback=fallback)


def make(files):
    """Write files; `-> PATH` makes a link."""
    for name, content in files.items():
        write(name, content)
        if str(content).startswith("-> "):
            os.remove(name)
            os.symlink(content[3:], name)


def book(text, word="START"):
    return f"*** {word} OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n{text}"


ONE, TWO = (f"{book(text)}\n{book('License.', 'END')}\n" for text in ("One.", "Two two two."))
OLD = ONE.replace("*** START OF THE", "***START OF THIS").replace("A BOOK", "A\nBOOK")  # wraps
BOOKS = f"License.\n{ONE}{TWO}"
FOUND = {  # files, sources, the files that are read; each has one character
    "folder: its .txt files by name": (
        {"b/2.txt": "2", "b/1.TXT": "1", "b/c.md": "c", "b/.d.txt": "d", "b/more/e.txt": "e"},
        ["b"], "12"),
    "pattern: any suffix and depth, nothing hidden": (
        {"b/1.md": "1", "b/more/2.md": "2", "b/.git/3.md": "3", "b/.4.md": "4", "b/5.txt": "5"},
        ["b/**/*.md"], "12"),
    "hidden, but named": ({"b/.git/1.md": "1", "b/.2.md": "2"}, ["b/.git/*", "b/.2.md"], "12"),
    "sources in their order, a file once": (
        {"b.txt": "b", "more/c.txt": "c", "more/a.txt": "a", "d.md": "d", "more/e.txt": "-> a.txt"},
        ["d.md", "b.txt", "more", "more/c.txt", "./b.txt"], "dbac"),
    "here, then beside the code": (
        {"data/a.txt": "a", "code/data/a.txt": "x", "code/data/b.txt": "b"},
        ["data/a.txt", "data/b.txt"], "ab"),
    "home folder": ({"home/a.txt": "a", "home/b.txt": "b"}, ["~/a.txt", "~/b.*"], "ab"),
    "no links below **": (
        {"a/1.txt": "1", "b/2.txt": "2", "a/b": "-> ../b", "a/a": "-> ."}, ["a/**/*.txt"], "1"),
    "a name in brackets": (
        {"[A] B*/1.srt": "1", "[A] B*/more/2.srt": "2", "A/3.srt": "3"}, ["[A] B*/**/*.srt"], "12"),
    "a name that is not UTF-8": ({os.fsdecode(b"b/caf\xe9.txt"): "a"}, ["b"], "a"),
    **{f"typed in {typed}, on the disk in {stored}": (
        {normalize(stored, f"é/{name}"): name[0] for name in ("o.txt", "ñ.txt", "ñoño.md")},
        [normalize(typed, source) for source in ("é", "é/ñ*.md")], "oññ")
       for typed, stored in (("NFC", "NFD"), ("NFD", "NFC"))},
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_text_found(name):
    files, sources, expected = FOUND[name]
    make(files)
    found = find(*sources).contents
    assert [content.removesuffix("\n") for content in found] == [*expected]


READ = {  # bytes, encoding, characters
    "named": ("naïve".encode("cp1252"), "cp1252", "naïve"),
    **{f"mark of {name}": ("\ufeff\ufeffΝαι 🙂".encode(name), "cp1252", "\ufeffΝαι 🙂")
       for name in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")},
    "line ends": (b"a\r\nb\rc\n\r\n\xc2\x85d\x0ce\r\r\n", "utf-8", "a\nb\nc\n\n\x85d\x0ce\n"),
    "Project Gutenberg": (BOOKS.replace("\n", "\r\n").encode(), "utf-8", "One.\nTwo two two.\n"),
    "its older marks": (OLD.encode(), "utf-8", "One.\n"),
    "its mark without an end": (book("a").encode(), "utf-8", book("a")),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_text_read(name):
    content, encoding, expected = READ[name]
    found = find(write("book.txt", content), encoding=encoding)
    assert found.contents == [expected] and "seems wrong" not in str(found.notes)


def test_text_sha256():
    """Of the characters and the borders of files, not of names or bytes."""
    make({"a/1.txt": "ab\n", "a/2.txt": "c", "b/8.txt": b"ab\r\n", "b/9.txt": b"\xef\xbb\xbfc"})
    make({"c/1.txt": "ab", "c/2.txt": "\nc", "d/1.txt": "ab\n", "d/2.txt": "d"})
    assert find("a").sha256 == find("b").sha256
    assert find("a").sha256 not in (find("c").sha256, find("d").sha256)
    assert find("a/1.txt").sha256 == sha256(b"ab\n").hexdigest()


# --------------------------------------------------------------------------------- notes and errors


def test_text_notes():
    """What a folder has besides, and a license that is left out; of the validation text too."""
    make({"n/1.txt": BOOKS, "n/a.MD": "", "n/b.MD": "", "n/c": "", "n/d/e.png": "", "n/.f": ""})
    notes = [
        'not read: 2 .MD, 1 other, 1 folder; a pattern reads more: "n/**/*.MD"',
        f"{len(BOOKS) - 18} characters outside the marks of Project Gutenberg left out",
    ]
    assert find("n").notes == notes
    for corpus in (load("n"), load("n/1.txt", val_sources=["n"])):
        assert {f"note: {note}" for note in notes} <= {*corpus.summary}


@pytest.mark.parametrize(("encoding", "named"), [("utf-8", "cp1252"), ("cp1252", "latin-1")])
def test_text_note_on_its_encoding(encoding, named):
    """UTF-8 that was read as another encoding, quotes of cp1252 as control characters."""
    content = "“naïve".encode(encoding)
    write("a/1.txt", content), write("a/2.txt", "ASCII"), write("a/3.txt", content)
    note = f"{named} seems wrong: a/1.txt may be {encoding}, a/3.txt may be {encoding}"
    assert find("a", encoding=named).notes == [note]


REFUSED = {  # files, source, words of the error
    "mistyped": ({"austen.txt": ""}, "austin.txt", "austin.txt (--sources=zzz.txt "
                 "--sources=austin.txt): no such file or folder; did you mean austen.txt?"),
    "broken link": ({"a.txt": "-> nowhere"}, "a.txt", "a.txt: No such file or directory"),
    "folder without texts": ({"a/b.md": ""}, "a", "a (--sources=zzz.txt --sources=a): contains no "
                             '.txt file; not read: 1 .md; a pattern reads more: "a/**/*.md"'),
    "not UTF-8": ({"a.txt": b"a\r\nb\ncaf\xe9 \xe0\n"}, "a.txt",
                  "a.txt: not UTF-8 at byte 8, line 3; if all files have another encoding, train"),
    "mark of UTF-8": ({"a.txt": b"\xef\xbb\xbfone\ntwo \xff"}, "a.txt",
                      "not UTF-8 at byte 11, line 2; it is damaged; save it again, in UTF-8"),
    "some files": ({f"a/{n}.txt": b"\n\xe9t\xe9" if n % 5 == 0 else "schön" for n in range(10, 50)},
                   "a", "8 of 41 files cannot be read: a/10.txt: not UTF-8 at byte 1, line 2, a"),
    **{name: ({"a.txt": "Ein Satz.\n".encode(name)}, "a.txt",
              f"a.txt: has NUL characters; if it is UTF-16: --encoding={name}; ")
       for name in ("utf-16-le", "utf-16-be")},
    "PDF": ({"a": b"%PDF-1.7\n\xe2\xe3"}, "a", "a: is a PDF; convert it to text first"),
    ".docx": ({"a": b"PK\3\4\xe2\xe3"}, "a", "a: is a ZIP archive (.docx); convert it to text"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_text_error(name):
    """Beside a source that can be read, too."""
    files, source, words = REFUSED[name]
    make(files)
    assert words in error_message(DataError, write("zzz.txt"), source)


def test_text_error_names_val_sources():
    message = error_message(DataError, write("a.txt"), val_sources=("a.txt", "b.txt"))
    assert message.startswith("b.txt (--val_sources=a.txt --val_sources=b.txt): no such file or ")


# ---------------------------------------------------------------------------------------- downloads

URL = "https://example.org/corpus/input.txt"
SOURCE = f"{URL}#sha256={sha256(TEXT.encode()).hexdigest()}"


@pytest.fixture
def network(monkeypatch):
    """A network that answers TEXT to every URL."""
    urlopen = Mock(side_effect=lambda *_, **__: io.BytesIO(TEXT.encode()))
    monkeypatch.setattr(text, "urlopen", urlopen)
    return urlopen


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_download_once(network, folder):
    """Beside the code."""
    (folder / "code" / "data").mkdir(parents=True)
    for source in (SOURCE, SOURCE.replace("example", "mirror"), "data/corpus/input.txt"):
        assert find(source).contents == [TEXT] and find(source).label.endswith("data/corpus")
    assert files_in(folder) == ["code/data/corpus/input.txt"] and network.call_count == 1


ANSWERS = [  # of the network, and what is wrong with each
    (HTTPError(URL, 404, "Not Found", {}, None), "HTTP Error 404: Not Found"),
    (ValueError("proxy URL with no authority"), "proxy URL with no authority"),
    ([io.BytesIO(b"<html>") for _ in range(2)], "6 bytes of another SHA-256"),
]


@pytest.mark.parametrize(("answer", "reason"), ANSWERS)
def test_download_failed(answer, reason, network, folder):
    """It leaves no files, and is replaced by the fallback."""
    make({"plays/a.txt": TEXT, "other.txt": "x"})
    network.side_effect = answer
    found = find("other.txt", SOURCE, fallback="plays")
    assert found.contents == [TEXT]
    fault = f"{URL}: {reason}; download it by other means, to data/corpus/input.txt, or name "
    assert found.notes[0].startswith(fault) and "; training on plays, " in found.notes[0]
    assert error_message(DataError, SOURCE).startswith(fault)
    assert files_in(folder) == ["other.txt", "plays/a.txt"]


def test_download_verified(network):
    """A file in its place with another content is refused."""
    message = error_message(DataError, SOURCE, fallback=write("data/corpus/input.txt", "x"))
    assert message.startswith(f"data/corpus/input.txt: not the file of {URL}, by its SHA-256; ")
    assert not network.called
