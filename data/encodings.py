"""Bytes of files as text: encodings, what is no text, and the license of Project Gutenberg."""

import codecs
import re
from collections.abc import Sequence
from pathlib import Path

from common.errors import DataError, first_few
from configs.fields import universal_newlines

# byte order mark -> encoding; UTF-32 comes first, because FF FE 00 00 begins with UTF-16's FF FE
ENCODING_OF_BOM = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# the lines before and after the text of a book of Project Gutenberg
GUTENBERG = re.compile(
    r"^\*\*\*[ \t]*(START|END) OF (?:THE|THIS) PROJECT GUTENBERG EBOOK.*\n?", re.MULTILINE
)


class EncodingError(DataError):
    """Bytes that are not in the encoding of a text.

    place   of the first: `byte 20, line 1`
    remedy  what to do: the end of the message
    """

    def __init__(self, message: str, place: str, remedy: str):
        super().__init__(f"{message}; {remedy}")
        self.place, self.remedy = place, remedy


def read_files(files: Sequence[Path], encoding: str) -> tuple[list[str], int]:
    """Return the characters of files, without licenses, and how many characters those had.

    Raises DataError for files that are no text; of several in another encoding, it names the first.
    """
    contents, faults, left_out = [], {}, 0
    for file in files:
        try:
            text = decode_text(file.read_bytes(), file, encoding, "--data.encoding")
        except EncodingError as error:
            faults[file] = error
            continue
        contents.append(without_license(text))
        left_out += len(text) - len(contents[-1])

    if len(faults) == 1:
        raise next(iter(faults.values()))
    if faults:
        places = first_few(f"{file} ({error.place})" for file, error in faults.items())
        raise DataError(
            f"{len(faults):,} of {len(files):,} files are not {encoding.upper()}: {places}; "
            f"{next(iter(faults.values())).remedy}"
        )
    return contents, left_out


def decode_text(content: bytes, name: str | Path, encoding: str, option: str = "") -> str:
    """Return the characters of a file, or of anything else with a `name`.

    All line ends become a newline. A byte order mark overrides `encoding` and is removed. Raises
    EncodingError or another DataError for bytes that are not text; the message tells which `option`
    names another encoding, or how to convert the file.
    """
    bom = next(filter(content.startswith, ENCODING_OF_BOM), b"")
    encoding = ENCODING_OF_BOM.get(bom, encoding)
    try:
        text = universal_newlines(content.decode(encoding))
    except UnicodeDecodeError as error:
        start = len(content) - len(error.object) + error.start  # error.object may lack the BOM
        line = universal_newlines(content[:start].decode(encoding, "ignore")).count("\n") + 1
        wrong, shown = wrong_bytes(content, encoding), encoding.removesuffix("-sig").upper()
        damaged = f"the file is damaged: iconv -c -f {shown} OLD > NEW leaves those out"
        raise EncodingError(
            f"{name}: not {shown} at byte {start:,} (line {line:,}); {wrong:,} of "
            f"{len(content):,} bytes cannot be decoded",
            f"byte {start:,}, line {line:,}",
            damaged if bom else remedy(content, encoding, option),
        ) from error

    # the default and the marked encodings never yield a surrogate, which is half a character
    may_have_surrogates = encoding not in ("utf-8", *ENCODING_OF_BOM.values())
    if "\0" in text:
        wrong = "NUL characters"
    elif may_have_surrogates and re.search("[\ud800-\udfff]", text):
        wrong = "surrogates"
    else:
        return text
    raise DataError(f"{name}: is not a text ({wrong}); {remedy(content, encoding, option)}")


def wrong_bytes(content: bytes, encoding: str) -> int:
    """Return how many bytes cannot be decoded: few in a damaged file, many in a wrong encoding."""
    count = 0

    def skip(error: UnicodeDecodeError) -> tuple[str, int]:
        nonlocal count
        count += error.end - error.start
        return "", error.end

    codecs.register_error("count", skip)
    content.decode(encoding, "count")
    return count


def remedy(content: bytes, encoding: str, option: str) -> str:
    """Return what to do with a file that is not a text in this encoding."""
    name, beginning = encoding.removesuffix("-sig").upper(), content[:1000]
    # Latin letters in UTF-16 without a mark: every second byte is NUL
    even, odd = beginning[::2].count(0), beginning[1::2].count(0)
    guess = ""
    if max(even, odd) > len(beginning) / 4 and min(even, odd) < len(beginning) / 16:
        guess = "utf-16le" if odd > even else "utf-16be"
    elif b"\0" in beginning or content.startswith((b"%PDF", b"PK", b"\x1f\x8b")):
        return "convert it to text first"

    if not option:
        return f"convert it: iconv -f {guess or 'ENCODING'} -t {name} OLD > NEW"
    if guess:
        return f"name its encoding: {option}={guess}"
    return (
        f"name its encoding: {option}=cp1252 (Western), cp1251 (Cyrillic), gb18030 (Chinese), "
        "shift-jis (Japanese), euc-kr (Korean) or any other that Python has; a file with few wrong "
        f"bytes is damaged: iconv -c -f {name} OLD > NEW leaves them out"
    )


def without_license(text: str) -> str:
    """Return what stands between the marks of Project Gutenberg; a text without them as it is."""
    if "PROJECT GUTENBERG EBOOK" not in text:  # quick: a text may be long
        return text
    books, start = [], None
    for mark in GUTENBERG.finditer(text):
        if mark[1] == "START":
            start = mark.end()
        elif start is not None:
            books.append(text[start : mark.start()])
            start = None
    return "".join(books) if books else text
