"""Files of text: reading them in chunks, and decoding bytes to characters."""

import codecs
import hashlib
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import IncrementalNewlineDecoder
from itertools import chain
from pathlib import Path

from common.errors import DataError

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


class WrongEncodingError(DataError):
    """A text whose bytes are not text in the encoding that was set; `problem` names the place."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"{problem}; {ALLOWED}; {remedy}")
        self.problem = problem


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
        with data_errors(self.path), open(self.path, "rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
        if digest.digest() != self.digest:
            raise DataError(
                f"{self.path}: changed while it was read; it must not change until "
                "training begins; try again"
            )


@contextmanager
def data_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be read: {error.strerror}; "
            "fix that, or name another source"
        ) from error


def find_file(path: Path) -> File:
    """Return the file at a path; raise DataError if there is none, or it cannot be read."""
    with data_errors(path):
        if not stat.S_ISREG(path.stat().st_mode):  # before opening, which would block for a pipe
            raise DataError(f"{path}: not a regular file; copy its content to one")
        with open(path, "rb") as opened:
            head = opened.read(HEAD_BYTES)
            opened.seek(0)
            digest = hashlib.file_digest(opened, "sha256").digest()
            return File(path, path.stat().st_size, digest, head)


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
        raise WrongEncodingError(
            f"{file.path}: looks like UTF-16 without a byte order mark",
            f"set --data.encoding=utf-16-{order}, {CONVERT}",
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
            raise WrongEncodingError(
                f"{file.path}: not {encoding.upper()} at byte {position} (line {line})",
                f"set {_likely_encodings(error.object)}, {CONVERT}",
            ) from error
        skip, bytes_before = max(0, skip - len(chunk)), bytes_before + len(chunk)
        on_read(len(chunk))
        if piece:
            yield piece


def read_text(file: File, encoding: str, newlines: str, max_characters: int) -> str:
    """Return the text of a file, which must have the encoding that the training text had.

    Raises DataError for another encoding (see `decoded`), and for more than max_characters.
    """
    pieces, length = [], 0
    try:
        for piece in decoded(file, encoding, newlines, on_read=lambda _: None):
            pieces.append(piece)
            length += len(piece)
            if length > max_characters:
                raise DataError(
                    f"{file.path}: more than {max_characters:,} characters, which is the most "
                    "allowed; use a part of the text"
                )
    except WrongEncodingError as error:
        raise DataError(
            f"{error.problem}; the training text was {encoding.upper()}; convert it: "
            f"iconv -f ENCODING -t {encoding.upper()} OLD > NEW"
        ) from error
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
