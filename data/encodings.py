"""Text from the bytes of files: encodings, faults, and licenses that are left out."""

import codecs
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from common.errors import DataError
from common.words import first_few
from configs.fields import universal_newlines

# byte order mark -> encoding; UTF-32 comes first, because FF FE 00 00 begins with UTF-16's FF FE
ENCODING_OF_BOM = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
ENCODINGS = (
    "cp1252 (Western), cp1251 (Cyrillic), gb18030 (Chinese), shift-jis (Japanese), euc-kr (Korean) "
    "or any other that Python has"
)
# the lines before and after the text of a book of Project Gutenberg; a long title wraps
GUTENBERG = re.compile(
    r"^\*\*\*[ \t]*(START|END) OF (?:THE|THIS) PROJECT GUTENBERG EBOOK"
    r"(?:[^*\n]*(?:\n[^*\n]+){1,2}\*\*\*)?.*\n?",
    re.MULTILINE,
)


class EncodingError(DataError):
    """Bytes that are no text in an encoding.

    fault      what is wrong, and where
    advice     what to do with the file
    encodings  those that it may have; "" if another encoding does not help
    """

    def __init__(self, fault: str, advice: str, encodings: str = ""):
        super().__init__(f"{fault}; {advice}")
        self.fault, self.advice, self.encodings = fault, advice, encodings


def read_files(
    files: Iterable[tuple[str | Path, bytes]], encoding: str, option: str = ""
) -> tuple[list[str], list[str]]:
    """Return the characters of files, given by their names and bytes, and notes for the user.

    Licenses of Project Gutenberg are left out. Raises DataError for files that are no text; the
    message names the `option` for another encoding, if there is one.
    """
    contents, errors, other_utf8, left_out = [], [], [], 0
    for name, content in files:
        try:
            text = decode_text(content, name, encoding)
        except EncodingError as error:
            errors.append(error)
            continue
        if encoding != "utf-8" and is_other_utf8(content, text):
            other_utf8.append(str(name))
        contents.append(strip_license(text))
        left_out += len(text) - len(contents[-1])

    if errors:
        faults, advice = first_few(error.fault for error in errors), errors[0].advice
        if len(errors) > 1:
            count = len(errors) + len(contents)
            faults = f"{len(errors):,} of {count:,} files cannot be read: {faults}"
        # with another encoding, the non-ASCII letters of the files that were read would be wrong
        if option and errors[0].encodings and all(map(str.isascii, contents)):
            advice = f"name the encoding: {option}={errors[0].encodings}"
        raise DataError(f"{faults}; {advice}")

    notes = []
    if other_utf8:
        notes.append(f"read as {encoding.upper()}, but valid UTF-8: {first_few(other_utf8)}")
    if left_out:
        notes.append(f"{left_out:,} characters outside the marks of Project Gutenberg left out")
    return contents, notes


def is_other_utf8(content: bytes, text: str) -> bool:
    """Return whether bytes, which were read as `text`, are another text in UTF-8."""
    with suppress(UnicodeDecodeError):
        return not content.isascii() and universal_newlines(content.decode("utf-8-sig")) != text
    return False


def decode_text(content: bytes, name: str | Path, encoding: str) -> str:
    """Return the characters of a file, or of anything else with a `name`.

    All line ends become a newline. A byte order mark overrides `encoding` and is removed. Raises
    EncodingError for bytes that are not text.
    """
    bom = next(filter(content.startswith, ENCODING_OF_BOM), b"")
    encoding = ENCODING_OF_BOM.get(bom, encoding)
    shown, nul = encoding.removesuffix("-sig").upper(), -1
    try:
        text = universal_newlines(content.decode(encoding))
        if encoding != "utf-8":
            text.encode()  # some encodings yield surrogates, which are half a character
        nul = text.find("\0")
        if nul < 0:
            return text
        fault = f"a NUL character in line {text.count(chr(10), 0, nul) + 1:,}"
    except UnicodeDecodeError as error:
        start = len(content) - len(error.object) + error.start  # error.object may lack the BOM
        line = universal_newlines(content[:start].decode(encoding, "ignore")).count("\n") + 1
        fault = f"not {shown} at byte {start:,} (line {line:,})"
    except UnicodeEncodeError:
        fault = f"not {shown}: surrogates"

    fault, beginning = f"{name}: {fault}", content[:1000]
    # Latin letters in UTF-16 without a mark: every second byte is NUL
    even, odd = beginning[::2].count(0), beginning[1::2].count(0)
    guess = ""
    if max(even, odd) > len(beginning) / 4 and min(even, odd) < len(beginning) / 16:
        guess = "utf-16le" if odd > even else "utf-16be"
    elif content.startswith((b"%PDF", b"PK", b"\x1f\x8b")) or (nul < 0 and b"\0" in beginning):
        raise EncodingError(fault, "convert it to text first")
    elif nul >= 0:
        raise EncodingError(fault, 'remove it: tr -d "\\000" < OLD > NEW')

    damaged = f"if it is damaged: iconv -c -f {shown} OLD > NEW"
    if bom:
        raise EncodingError(fault, damaged)
    other = guess or ("cp1252" if shown == "UTF-8" else "UTF-8")
    convert = f"convert to {shown}: iconv -f {other} -t {shown} OLD > NEW; {damaged}"
    raise EncodingError(fault, convert, guess or f"{ENCODINGS}; {damaged}")


def strip_license(text: str) -> str:
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
