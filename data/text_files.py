"""Where a text may lie, and the files that are found there.

A source is what stands in `data.sources`: a file, a folder, a pattern, or an address with the
SHA-256 of what it holds. One that is missing is passed over; one that is there but cannot be read
is an error, because nobody wants to learn from another text than the one named.
"""

import codecs
import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import IncrementalNewlineDecoder
from itertools import chain
from pathlib import Path

from common.errors import ConfigError, DataError, did_you_mean, escape
from data.download import Unavailable, download

CHUNK = 2**18  # bytes that are read at a time: what is made of them stays in a processor's cache
HEAD = 4096  # bytes by which an encoding is told
_ADDRESS = re.compile(
    r"(https://[^\s#]+/(\w[\w.-]*)/[^\s/#]+)#sha256=([0-9a-f]{64})", re.IGNORECASE
)


@dataclass(frozen=True)
class Source:
    """One alternative: where its text lies, and where it can be had if it does not lie
    there yet.
    """

    label: str
    path: Path
    url: str | None = None
    sha256: str | None = None

    @classmethod
    def parse(cls, source: str) -> "Source":
        """Raises ConfigError for what can be no file, folder or address."""
        if match := _ADDRESS.fullmatch(source):
            url, name, sha256 = match.groups()
            return cls(url, Path("data", name, "input.txt"), url, sha256.lower())
        if "://" in source:
            raise ConfigError(
                f"data.sources: not a usable address: {escape(source)}; allowed is "
                "https://HOST/.../NAME/FILE#sha256= and 64 hex digits; or give the path of a file"
            )
        if not source or "\0" in source:
            raise ConfigError(
                "data.sources: an empty name, or one with a NUL; give a file, a folder or an "
                "address"
            )
        return cls(source, Path(source))

    @property
    def name(self) -> str:
        """For people: the folder of an `input.txt`, the pattern, else the file's or folder's own
        name.
        """
        if _is_pattern(self.path):
            return self.label
        path = self.path.absolute()
        return path.parent.name if path.name == "input.txt" else path.name

    def find(self, wanted: str | None, notify: Callable[[str], None]) -> "Text":
        """The text of this source, downloaded if need be; only one with the SHA-256 `wanted`, if
        that is given.

        Raises Unavailable, or DataError for what is there and cannot be read.
        """
        if wanted and self.sha256 not in (None, wanted):
            raise Unavailable(f"another text, SHA-256 {self.sha256}")
        found = next(filter(None, map(_look, self._places())), None)
        if not found:
            if not self.url:
                raise Unavailable(
                    "nothing matches" if _is_pattern(self.path) else "no such file or folder"
                )
            download(self.url, self.sha256, self.path, notify)
            found = _look(self.path)
        if found.sha256 != (self.sha256 or wanted or found.sha256):
            raise Unavailable(f"{found.place} holds another text, SHA-256 {found.sha256}")
        return found

    def guess(self, otherwise: str) -> str:
        """What may have been meant by a name that is not there: the nearest in its folder, or
        `otherwise`.
        """
        try:
            beside = {
                name: str(self.path.with_name(name))
                for name in sorted(os.listdir(self.path.parent))[:1000]
            }
        except OSError:
            return otherwise
        return escape(did_you_mean(self.path.name, beside, otherwise))

    def _places(self) -> list[Path]:
        elsewhere = os.environ.get("HORNBOOK_CORPORA")
        match self.path.parts:
            case ("data", name, "input.txt") if elsewhere:
                return [self.path, Path(elsewhere, name, "input.txt")]
        return [self.path]


@dataclass(frozen=True)
class File:
    """One file of a text as it was found: how long, with which SHA-256 (binary), and how
    it begins.
    """

    path: Path
    size: int
    digest: bytes
    head: bytes

    def chunks(self) -> Iterator[bytes]:
        """Its bytes, CHUNK at a time; DataError at their end unless they are those that
        were found.
        """
        digest = hashlib.sha256()
        with _readable(self.path), open(self.path, "rb") as opened:
            while chunk := opened.read(CHUNK):
                digest.update(chunk)
                yield chunk
        if digest.digest() != self.digest:
            raise DataError(
                f"{escape(self.path)}: changed while it was read; a text must stay as it is "
                f"until training begins; "
                "try again"
            )


@dataclass(frozen=True)
class Text:
    """The files that one corpus is read from, in order."""

    place: Path
    files: Sequence[File]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def sha256(self) -> str:
        """That of the file's bytes; of several files, the SHA-256 of their (binary) SHA-256s joined
        in order.

        So it depends on the contents and on where each ends, not on the names.
        """
        digests = [file.digest for file in self.files]
        return (
            digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()
        ).hex()


@contextmanager
def _readable(place: Path) -> Iterator[None]:
    """Answer with a DataError what the system says of a file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{escape(error.filename or place)}: cannot be read: {error.strerror}; mend it, or "
            f"name another source"
        ) from error


def _look(place: Path) -> Text | None:
    """The text at `place`, a file, a folder or a pattern; None where there is nothing."""
    with _readable(place):
        if _is_pattern(place):
            matches = map(
                Path, glob.iglob(str(place), recursive=True)
            )  # ** stands for any number of folders
            paths = sorted(path for path in matches if not path.is_dir())
        else:
            try:
                place.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            paths = _text_files(place) if stat.S_ISDIR(place.stat().st_mode) else [place]
        return Text(place, [_file(path) for path in paths]) if paths else None


def _is_pattern(path: Path) -> bool:
    return re.search(r"[*?]|\[.+\]", str(path)) is not None and not os.path.lexists(path)


def _text_files(folder: Path) -> list[Path]:
    files = sorted(
        f for f in folder.iterdir() if f.suffix.lower() == ".txt" and not f.name.startswith(".")
    )
    if not files:
        raise DataError(
            f"{escape(folder)}: holds no text; a folder's texts are its *.txt files; add one, "
            f"or give a pattern "
            "such as 'FOLDER/*.md'"
        )
    return files


def _file(path: Path) -> File:
    if not stat.S_ISREG(
        path.stat().st_mode
    ):  # asked before opening, which would wait for a pipe's writer
        raise DataError(
            f"{escape(path)}: not a regular file; only such can hold a text; copy it to one"
        )
    with open(path, "rb") as opened:
        head = opened.read(HEAD)
        opened.seek(0)
        return File(path, path.stat().st_size, hashlib.file_digest(opened, "sha256").digest(), head)


# ------------------------------------------------------------ decoding

_MARKS = {  # UTF-32 before UTF-16, whose little-endian mark it begins with
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_ALLOWED = "allowed are UTF-8, and UTF-16 or UTF-32 with a byte order mark"
_CONVERT = "or convert it: iconv -f ENCODING -t UTF-8"


def mark_of(file: File) -> bytes:
    """The byte order mark that `file` begins with, b"" if none."""
    return next(filter(file.head.startswith, _MARKS), b"")


def decoded(
    file: File, encoding: str, newlines: str, read: Callable[[int], object]
) -> Iterator[str]:
    """The characters of `file` without its byte order mark, in pieces none of which ends between
    \\r and \\n.

    A mark tells the encoding; without one it is `encoding`. With `newlines` "unix" every \\r\\n and
    \\r is a \\n. `read` hears how many bytes were read. Raises DataError, with byte and line, for
    bytes that are no text.
    """
    mark = mark_of(file)
    if (
        not mark
        and codecs.lookup(encoding).name == "utf-8"
        and (order := _order_of_utf16(file.head))
    ):
        raise DataError(
            f"{escape(file.path)}: looks like UTF-16 without a byte order mark; {_ALLOWED}; "
            f"set data.encoding=utf-16-{order}, {_CONVERT}"
        )
    encoding = _MARKS.get(mark, encoding)
    decoder = IncrementalNewlineDecoder(
        codecs.getincrementaldecoder(encoding)(), translate=newlines == "unix"
    )
    skip, before = len(mark), 0
    for chunk in chain(file.chunks(), [b""]):
        try:
            piece = decoder.decode(chunk[skip:], final=not chunk)
        except UnicodeDecodeError as error:
            place = before + len(chunk) - len(error.object) + error.start
            line = _line(file, encoding, place)
            raise DataError(
                f"{escape(file.path)}: not {encoding.upper()} at byte {place} (line {line}); "
                f"{_ALLOWED}; "
                f"set data.encoding to what it is, {_CONVERT}"
            ) from error
        skip, before = max(0, skip - len(chunk)), before + len(chunk)
        read(len(chunk))
        if piece:
            yield piece


def _line(file: File, encoding: str, place: int) -> int:
    """The number of the line in which byte `place` lies, from 1."""
    decoder, line = codecs.getincrementaldecoder(encoding)("replace"), 1
    for chunk in file.chunks():
        line += decoder.decode(chunk[: max(0, place)]).count("\n")
        place -= len(chunk)
    return line


def _order_of_utf16(head: bytes) -> str | None:
    """The byte order of what looks like UTF-16: every other byte takes few values, zero among them.

    These are the upper halves of an alphabet's characters.
    """
    even, odd = set(head[::2]), set(head[1::2])
    for upper, lower, order in ((odd, even, "le"), (even, odd, "be")):
        if 0 in upper and 4 * len(upper) <= len(lower):
            return order
    return None
