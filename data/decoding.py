"""From bytes to characters, a piece at a time: the byte order mark, the encoding, the ends of
lines.
"""

import codecs
from collections.abc import Callable, Iterator
from io import IncrementalNewlineDecoder
from itertools import chain

from configs.errors import DataError, printable
from data.sources import File

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
            f"{printable(file.path)}: looks like UTF-16 without a byte order mark; {_ALLOWED}; "
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
                f"{printable(file.path)}: not {encoding.upper()} at byte {place} (line {line}); "
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
