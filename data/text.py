"""Bytes -> characters: the files of some sources are found or downloaded, and decoded.

A source is a file, a folder, a pattern, or a URL with the SHA-256 of its bytes. All sources of a
text are read, in their order, as one. Names of files are compared in NFC, the Unicode form with one
character for each letter: files from a Mac can have two for an é, the e and its accent (NFD).

Nothing here imports torch or NumPy: `find_sources` says within milliseconds what is missing.
"""

import codecs
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from unicodedata import normalize
from urllib.request import urlopen

from common.console import DataError
from common.files import ROOT, expand_home, resolve_bundled, shell_command
from common.messages import did_you_mean, first_few
from configs.fields import TEXT_URL, universal_newlines

BOMS = {  # byte order mark -> encoding; UTF-32 comes first: its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be", codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be",
}  # fmt: skip
# how files begin that are no text -> what they are
NO_TEXT = {b"%PDF": "a PDF", b"PK\3\4": "a ZIP archive (.docx)", b"\x1f\x8b": "a GZIP archive"}
OTHER_ENCODING = (
    "if all files have another encoding, train with --encoding=cp1252 (Western), cp1251 "
    "(Cyrillic), gb18030 or utf-16-le (Chinese), cp932 (Japanese) or cp949 (Korean); else convert "
    "those that have: iconv -f cp1252 -t UTF-8 OLD > NEW"
)
# what stands between the marks in a book of Project Gutenberg; a long title wraps
BOOK = re.compile(r"(?ms)^\*{3} ?START OF TH[^*]+GUTENBERG[^*]+\*{3}.*?\n(.*?)^\*{3} ?END OF TH")


class DownloadError(DataError):
    """A text that cannot be downloaded."""


@dataclass(frozen=True)
class Text:
    """The content of one or more files.

    label     for messages: where the first source is, and how many more
    contents  the characters of each file, in the order of the sources and of the files' names
    notes     for the user, such as what was not read
    sources   what was read: the settings' sources, or their fallback
    sha256    of the characters, whatever the line ends, encoding and names of the files: that of a
              single file, or of the concatenated SHA-256s of several
    """

    label: str
    contents: list[str]
    notes: list[str]
    sources: tuple[str, ...]
    sha256: str


def read_text(sources: Sequence[str], encoding: str, option: str = "", fallback: str = "") -> Text:
    """Read all of some sources as one text; if a download fails, read the `fallback` instead.

    Raises DataError for a source that is missing, with the `option` that names it, or that cannot
    be read.
    """
    locations, files = [], {}
    try:
        paths = [str(fetch(s)) if TEXT_URL.fullmatch(s) else s for s in sources]
        for location, found in find_sources(paths, option):
            locations.append(location)
            for file in found:  # a file that two sources reach counts once, at its first place
                files.setdefault(os.path.realpath(file), file)
        contents, notes = decode_files(files.values(), encoding)
        folders = filter(Path.is_dir, locations)
        notes += [note for folder in folders if (note := describe_unread(folder, files))]
    except DownloadError as error:
        if not fallback:
            raise
        text = read_text((fallback,), encoding, "fallback")
        text.notes.insert(0, f"{error}; training on {fallback}, losses on it are not comparable")
        return text
    except OSError as error:
        where = error.filename or sources[0]
        raise DataError(f"{where}: {error.strerror}; fix that, or name another source") from error

    books = list(map(between_marks, contents))
    if left_out := sum(map(len, contents)) - sum(map(len, books)):
        notes.append(f"{left_out:,} characters outside the marks of Project Gutenberg left out")
    # file boundaries matter: the end of each file is held out
    digests = [hashlib.sha256(book.encode()) for book in books]
    if len(books) > 1:
        digests[0] = hashlib.sha256(b"".join(digest.digest() for digest in digests))
        # the last line of a file must not run into the first line of the next
        books = [book + "\n" * (book[-1:] not in ("", "\n")) for book in books]
    path = locations[0].parent if locations[0].match("data/*/input.txt") else locations[0]
    more = f", and {len(sources) - 1} more" if len(sources) > 1 else ""
    return Text(f"{path}{more}", books, notes, tuple(sources), digests[0].hexdigest())


def between_marks(text: str) -> str:
    """Return what stands between Project Gutenberg's marks, or the text if it has none."""
    if "GUTENBERG" not in text:  # much faster than the pattern in a long text
        return text
    return "".join(BOOK.findall(text)) or text


def find_sources(sources: Sequence[str], option: str = "") -> list[tuple[Path, list[Path]]]:
    """Return where each source is, and its files; URLs are left out.

    Raises DataError for a source that is missing, with the `option` as it names all sources.
    """
    options = shell_command(*(f"--{option}={source}" for source in sources))
    named_by = f" ({options})" if option else ""
    return [find(source, named_by) for source in sources if not TEXT_URL.fullmatch(source)]


def find(source: str, named_by: str = "") -> tuple[Path, list[Path]]:
    """Return where a source is, and its files, sorted by name, the same on every system.

    A path is relative to the current folder, or else to the folder of the code.
    """
    path = expand_home(source)
    for location in (as_on_disk(path), as_on_disk(ROOT / path)):
        if os.path.lexists(location):  # what exists as it is written is no pattern
            matches = location.glob("*.[tT][xX][tT]") if location.is_dir() else [location]
        else:  # `**` follows no links, because two of them may form a circle
            base = next(filter(os.path.lexists, location.parents), None)
            if base is None:  # a drive of Windows that is not there
                continue
            parts = location.relative_to(base).parts
            if parts[-1] == "**":  # alone it would mean folders
                parts += ("*",)
            parts = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts]
            patterns = (normalize(form, "/".join(parts)) for form in ("NFC", "NFD"))
            matches = {file for pattern in patterns for file in base.glob(pattern)}
        files = [file for file in matches if not file.is_dir()]
        files.sort(key=lambda file: ([normalize("NFC", part) for part in file.parts], file.parts))
        named = set(location.parts)  # what is hidden is only read where it is named
        files = [f for f in files if not any(p[0] == "." for p in set(f.parts) - named)]
        if files:
            return location, files
        if location.is_dir():
            unread = describe_unread(location, ()) or "add one"
            raise DataError(f"{location}{named_by}: contains no .txt file; {unread}")
    names = {entry.name: str(entry) for entry in as_on_disk(path.parent).glob("*")}
    hint = did_you_mean(path.name, names, "name an existing file or folder, or a URL")
    if "," in source:
        hint = "several texts need the option once for each"
    raise DataError(f"{source}{named_by}: no such file or folder; {hint}")


def as_on_disk(path: Path) -> Path:
    """Return a path with its names in the Unicode form that they have on the disk, if they exist.

    So a `Café.txt` that is typed in NFC is found in NFD, and the other way round.
    """
    if os.path.lexists(path) or path == path.parent:
        return path
    folder, name = as_on_disk(path.parent), normalize("NFC", path.name)
    same = (entry for entry in folder.glob("*") if normalize("NFC", entry.name) == name)
    return next(same, folder / path.name)


def describe_unread(folder: Path, read: Collection[str]) -> str:
    """Return what of a folder is not read, with a pattern that reads it, or "" if all is read.

    `read` has the real paths of the files that are read.
    """
    kinds = Counter(
        "folder" if entry.is_dir() else entry.suffix or "other"
        for entry in sorted(folder.iterdir())
        if not entry.name.startswith(".") and os.path.realpath(entry) not in read
    ).most_common()
    if not kinds:
        return ""
    unread = first_few(f"{count:,} {kind}" for kind, count in kinds)
    suffix = next((kind for kind, _ in kinds if kind.startswith(".")), ".txt")
    return f'not read: {unread}; a pattern reads more: "{folder}/**/*{suffix}"'


def fetch(source: str) -> Path:
    """Return the file of a URL, downloaded unless it is there; both must have the right SHA-256.

    It is data/NAME/input.txt; NAME is that of the URL's file, or of its folder for an input.txt.
    """
    address, folder, file, sha256 = TEXT_URL.fullmatch(source).groups()
    stem = Path(file).stem
    path = resolve_bundled(Path("data", folder if stem == "input" else stem, "input.txt"))
    if path.exists():
        if hashlib.sha256(path.read_bytes()).hexdigest() != sha256.lower():
            advice = "delete it to download it again, or name it itself"
            raise DataError(f"{path}: not the file of {address}, by its SHA-256; {advice}")
        return path

    advice = f"download it by other means, to {path}, or name another text"
    try:
        with urlopen(address, timeout=10) as response:  # noqa: S310 - it begins with https
            content = response.read()
    except (OSError, HTTPException, ValueError) as error:  # ValueError: of a proxy's address
        raise DownloadError(f"{address}: {str(error)[:200]}; {advice}") from error
    if hashlib.sha256(content).hexdigest() != sha256.lower():
        raise DownloadError(f"{address}: {len(content):,} bytes of another SHA-256; {advice}")
    # beside the code, every command finds the file
    path = ROOT / path if os.access(ROOT / "data", os.W_OK) else path
    path.parent.mkdir(parents=True, exist_ok=True)
    # renamed when it is complete; each process has a file of its own
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
    return path


def decode_files(files: Iterable[Path], encoding: str) -> tuple[list[str], list[str]]:
    """Return the characters of files, and notes on files that seem to have another encoding.

    All line ends become a newline. A byte order mark overrides `encoding` and is removed. Raises
    DataError, with one line for all of them, if files are no text.
    """
    contents, faults, advice, doubtful = [], [], "", []
    for file in files:
        content = file.read_bytes()
        bom = next(filter(content.startswith, BOMS), b"")
        codec = BOMS.get(bom, encoding)
        try:
            text = universal_newlines(content.decode(codec)).removeprefix("\ufeff")  # the mark
            if codec != "utf-8":
                text.encode()  # some encodings yield surrogates, which are half a character
            fault = "has NUL characters" if "\0" in text else ""
        except UnicodeError as error:
            start = getattr(error, "start", 0)
            line = content.count(b"\n", 0, start) + 1
            fault = f"not {codec.upper()} at byte {start:,}, line {line:,}"
        remedy = OTHER_ENCODING
        if kind := next((NO_TEXT[start] for start in NO_TEXT if content.startswith(start)), ""):
            fault, remedy = f"is {kind}", "convert it to text first"
        elif bom:
            remedy = "it is damaged; save it again, in UTF-8"
        elif fault and b"\0" in content:  # in UTF-16, spaces and newlines have one
            order = "be" if content[::2].count(0) > content[1::2].count(0) else "le"
            remedy = f"if it is UTF-16: --encoding=utf-16-{order}; else convert it to text first"
        if fault:
            faults.append(f"{file}: {fault}")
            advice = advice or remedy
            text = ""
        else:
            contents.append(text)
        if not bom and encoding != "utf-8" and (other := likelier_encoding(content, text)):
            doubtful.append(f"{file} may be {other}")
    notes = [f"{encoding} seems wrong: {first_few(doubtful)}"] if doubtful else []
    if faults:
        fault = first_few(faults)
        if len(faults) > 1:
            fault = (
                f"{len(faults):,} of {len(faults) + len(contents):,} files cannot be read: {fault}"
            )
        raise DataError("; ".join([fault, *notes, advice]))
    return contents, notes


def likelier_encoding(content: bytes, text: str) -> str:
    """Return the encoding that bytes seem to have, unless they were read as `text` in it; or ""."""
    utf8 = universal_newlines(content.decode("utf-8", "replace"))
    if content.isascii() or utf8 == text:
        return ""
    if "\ufffd" not in utf8:
        return "utf-8"
    # where cp1252 has letters and quotes, latin-1 has control characters, which no text has
    return "cp1252" if re.search("[\x80-\x9f]", text) else ""
