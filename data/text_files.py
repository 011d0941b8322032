"""Sources of text: finding the files, reading them in chunks, decoding bytes to characters.

A source is an entry of `data.sources`: a file, a folder, a pattern, or an address with the SHA-256
of its content. A missing source is skipped. One that exists but cannot be read is an error, because
the run would otherwise train on a text that the user did not intend.
"""

import codecs
import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import IncrementalNewlineDecoder
from itertools import chain
from pathlib import Path

from common.errors import DataError, did_you_mean
from common.files import ROOT
from configs.schema import ADDRESS
from data.download import Unavailable, download

CHUNK_BYTES = 2**18  # a chunk and all that is computed from it fit into the CPU's cache
HEAD_BYTES = 4096  # read from the start of a file to detect its encoding
MARKS = {  # UTF-32 first, because its little-endian mark begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
ALLOWED = "allowed: UTF-8, and UTF-16 or UTF-32 with a byte order mark"
LIKELY_ENCODINGS = ("cp1252", "gb18030", "shift-jis", "euc-kr")
CONVERT = "or convert it: iconv -f ENCODING -t UTF-8 OLD > NEW"

# ------------------------------------------------------------------------------------------ sources


@dataclass(frozen=True)
class Source:
    """A source: the path of its text, and where to download that if it does not exist.

    A relative path is looked for under the current folder, then beside the code.
    """

    label: str
    path: Path
    url: str | None = None
    sha256: str | None = None

    @classmethod
    def parse(cls, source: str) -> "Source":
        """Parse an entry of data.sources.

        The FILE of an address is stored as data/STEM/input.txt, an input.txt under the name of its
        folder.
        """
        if match := ADDRESS.fullmatch(source):
            url, folder, file, sha256 = match.groups()
            stem = Path(file).stem
            name = folder if stem == "input" else stem
            return cls(url, Path("data", name, "input.txt"), url, sha256.lower())
        return cls(source, Path(source))

    @property
    def name(self) -> str:
        """A name for messages: the folder of an `input.txt`, a pattern, or the file's own name."""
        if _is_pattern(self.path):
            return self.label
        path = self.path.absolute()
        return path.parent.name if path.name == "input.txt" else path.name

    def find(self, wanted: str | None, notify: Callable[[str], None]) -> "Text":
        """Return the text of this source, downloaded if necessary.

        With `wanted`, only a text with that SHA-256. Raises Unavailable if there is none, DataError
        if it exists but cannot be read.
        """
        if wanted and self.sha256 not in (None, wanted):
            raise Unavailable(f"a different text, SHA-256 {self.sha256}")
        found = next(filter(None, map(_text_at, self._paths())), None)
        if not found:
            if not self.url:
                missing = "nothing matches" if _is_pattern(self.path) else "no such file or folder"
                raise Unavailable(missing)
            target = ROOT / self.path if os.access(ROOT / "data", os.W_OK) else self.path
            download(self.url, self.sha256, target, notify)
            found = _text_at(target)
        if found.sha256 != (self.sha256 or wanted or found.sha256):
            raise Unavailable(f"{found.path} is a different text, SHA-256 {found.sha256}")
        return found

    def suggestion(self, otherwise: str) -> str:
        """Return "did you mean X?" for the nearest name in the folder, or `otherwise`."""
        try:
            names = sorted(os.listdir(self.path.parent))[:1000]
        except OSError:
            return otherwise
        known = {name: str(self.path.with_name(name)) for name in names}
        return did_you_mean(self.path.name, known, otherwise)

    def _paths(self) -> list[Path]:
        """Return the paths to try: `data/NAME/input.txt` may also be in $HORNBOOK_CORPORA."""
        paths = [self.path, ROOT / self.path]
        elsewhere = os.environ.get("HORNBOOK_CORPORA")
        match self.path.parts:
            case ("data", name, "input.txt") if elsewhere:
                paths.append(Path(elsewhere, name, "input.txt"))
        return paths


@dataclass(frozen=True)
class File:
    """A file, with the size, SHA-256 (binary) and first bytes that it had when it was found."""

    path: Path
    size: int
    digest: bytes
    head: bytes

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in chunks; raise DataError at the end if they have changed."""
        digest = hashlib.sha256()
        with _data_errors(self.path), open(self.path, "rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
        if digest.digest() != self.digest:
            raise DataError(
                f"{self.path}: changed while it was read; it must not change until "
                "training begins; try again"
            )


@dataclass(frozen=True)
class Text:
    """The files of a corpus, in order; `path` is the file, folder or pattern they came from."""

    path: Path
    files: Sequence[File]

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files)

    @property
    def sha256(self) -> str:
        """The SHA-256 of a single file. For several files: that of their concatenated SHA-256s.

        It depends on the contents and on where each file ends, not on file names.
        """
        digests = [file.digest for file in self.files]
        if len(digests) > 1:
            return hashlib.sha256(b"".join(digests)).hexdigest()
        return digests[0].hex()


@contextmanager
def _data_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be read: {error.strerror}; "
            "fix that, or name another source"
        ) from error


def _text_at(path: Path) -> Text | None:
    """Return the text at a path (a file, a folder or a pattern), or None if nothing is there."""
    with _data_errors(path):
        if _is_pattern(path):
            matches = map(Path, glob.iglob(str(path), recursive=True))
            paths = sorted(match for match in matches if not match.is_dir())
        else:
            try:
                path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            paths = _text_files(path) if stat.S_ISDIR(path.stat().st_mode) else [path]
        return Text(path, [_file(each) for each in paths]) if paths else None


def _is_pattern(path: Path) -> bool:
    return re.search(r"[*?]|\[.+\]", str(path)) is not None and not os.path.lexists(path)


def _text_files(folder: Path) -> list[Path]:
    """Return the visible .txt files of a folder, sorted."""
    files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() == ".txt" and not path.name.startswith(".")
    )
    if not files:
        raise DataError(
            f"{folder}: contains no text; the texts of a folder are its *.txt files; "
            "add one, or give a pattern such as 'FOLDER/*.md'"
        )
    return files


def _file(path: Path) -> File:
    if not stat.S_ISREG(path.stat().st_mode):  # before opening, which would block for a pipe
        raise DataError(f"{path}: not a regular file; copy its content to one")
    with open(path, "rb") as opened:
        head = opened.read(HEAD_BYTES)
        opened.seek(0)
        return File(path, path.stat().st_size, hashlib.file_digest(opened, "sha256").digest(), head)


def find_file(path: Path) -> File:
    """Return the file at a path; raise DataError if there is none, or it cannot be read."""
    with _data_errors(path):
        return _file(path)


# ----------------------------------------------------------------------------------------- decoding


def byte_order_mark(file: File) -> bytes:
    """Return the byte order mark at the start of a file, or b"" if there is none."""
    return next(filter(file.head.startswith, MARKS), b"")


def decoded(
    file: File, encoding: str, newlines: str, on_read: Callable[[int], object]
) -> Iterator[str]:
    """Yield the characters of a file without its byte order mark, never split between \\r and \\n.

    A byte order mark determines the encoding; without one it is `encoding`. With `newlines` "unix"
    every \\r\\n and \\r becomes \\n. `on_read` is called with the number of bytes read. Raises
    DataError, with byte and line, for bytes that are not text.
    """
    mark = byte_order_mark(file)
    if not mark and codecs.lookup(encoding).name == "utf-8" and (order := _utf16_order(file.head)):
        raise DataError(
            f"{file.path}: looks like UTF-16 without a byte order mark; {ALLOWED}; "
            f"set --data.encoding=utf-16-{order}, {CONVERT}"
        )
    encoding = MARKS.get(mark, encoding)
    decoder = codecs.getincrementaldecoder(encoding)()
    decoder = IncrementalNewlineDecoder(decoder, translate=newlines == "unix")
    skip, bytes_before = len(mark), 0
    for chunk in chain(file.chunks(), [b""]):
        try:
            piece = decoder.decode(chunk[skip:], final=not chunk)
        except UnicodeDecodeError as error:
            position = bytes_before + len(chunk) - len(error.object) + error.start
            line = _line_number(file, encoding, position)
            raise DataError(
                f"{file.path}: not {encoding.upper()} at byte {position} (line {line}); "
                f"{ALLOWED}; set {_likely_encodings(error.object)}, {CONVERT}"
            ) from error
        skip, bytes_before = max(0, skip - len(chunk)), bytes_before + len(chunk)
        on_read(len(chunk))
        if piece:
            yield piece


def read_text(file: File, encoding: str, newlines: str, max_characters: int) -> str:
    """Return the text of a file (see `decoded`); raise DataError for more than max_characters."""
    pieces, length = [], 0
    for piece in decoded(file, encoding, newlines, on_read=lambda _: None):
        pieces.append(piece)
        length += len(piece)
        if length > max_characters:
            raise DataError(
                f"{file.path}: more than {max_characters:,} characters, which is the most "
                "allowed; use a part of the text"
            )
    return "".join(pieces)


def _likely_encodings(content: bytes) -> str:
    """Return options with up to two encodings that can decode these bytes, for a message."""
    possible = []
    for name in LIKELY_ENCODINGS:
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder(name)().decode(content)
            possible.append(f"--data.encoding={name}")
    return " or ".join(possible[:2]) if possible else "data.encoding to its actual encoding"


def _line_number(file: File, encoding: str, position: int) -> int:
    """Return the number of the line that contains a byte, counted from 1."""
    decoder, line = codecs.getincrementaldecoder(encoding)("replace"), 1
    for chunk in file.chunks():
        line += decoder.decode(chunk[: max(0, position)]).count("\n")
        position -= len(chunk)
    return line


def _utf16_order(head: bytes) -> str | None:
    """Return the byte order, "le" or "be", of bytes that look like UTF-16, otherwise None.

    In UTF-16 every other byte is the upper byte of a character. In the text of one alphabet the
    upper bytes have few different values, 0 among them.
    """
    even, odd = set(head[::2]), set(head[1::2])
    for upper, lower, order in ((odd, even, "le"), (even, odd, "be")):
        if 0 in upper and 4 * len(upper) <= len(lower):
            return order
    return None
