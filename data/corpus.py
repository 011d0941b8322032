"""From a list of places where a text may be to the ids of its training and validation part.

The sources are alternatives: the first that can be had is the text. One that is missing is passed over; one that is
there but cannot be read is an error, because nobody wants to learn from another text than the one named.
"""

import codecs
import hashlib
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from configs.errors import CheckpointError, ConfigError, DataError, printable
from data.download import Unavailable, download
from data.tokenizer import CharTokenizer, named

_URL = re.compile(r"(https://[^\s#]+/(\w[\w.-]*)/[^\s/#]+)#sha256=([0-9a-f]{64})", re.ASCII | re.IGNORECASE)
_MARKS = {  # UTF-32 before UTF-16, whose little-endian mark it begins with
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_ALLOWED = "allowed are UTF-8, and UTF-16 or UTF-32 with a byte order mark; convert it: iconv -f ENCODING -t UTF-8"


@dataclass(frozen=True, eq=False)
class Split:
    """The part of a corpus to train on, or to validate on.

    `ids` is the whole corpus, shared by both splits and perhaps memory-mapped; `segments` are the (start, end) in it
    that belong to this split, one for each file. No window crosses the end of a segment.
    """

    ids: np.ndarray
    segments: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(end - start for start, end in self.segments)

    def stretch(self, characters: int) -> "Split":
        """The first `characters` characters of this split: a fixed text to measure a loss on."""
        segments = []
        for start, end in self.segments:
            end = min(end, start + characters)
            segments.append((start, end))
            characters -= end - start
        return Split(self.ids, tuple(segments))


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    name        for people: `tinyshakespeare`, `plays`, `book.txt`
    sha256      of the file's bytes; of several files, the SHA-256 of their (binary) SHA-256s joined in order, so
                that it depends on the contents and on where each ends, not on the names
    characters  in all files together
    """

    name: str
    sha256: str
    characters: int
    tokenizer: CharTokenizer
    train: Split
    val: Split


def load_corpus(
    sources: Sequence[str],
    *,
    say: Callable[[str], None],
    wanted_sha256: str | None = None,
    vocabulary: str | None = None,
) -> Corpus:
    """The first text of `sources` that can be had, split 90 : 10 within each file and encoded.

    A source is a file, a folder (its *.txt files, sorted by name, are one corpus) or
    `https://.../NAME/FILE#sha256=HEX`, which is downloaded once to `data/NAME/input.txt`. What is named
    `data/NAME/input.txt` is also looked for as `NAME/input.txt` in the folder $HORNBOOK_CORPORA, before any network.

    With `wanted_sha256` (a resumed run) it is the text with that digest, wherever it stands in the list; with
    `vocabulary` (a run that starts from another's weights) the text is encoded with that one, not its own.
    `say` gets a line on which text was taken and why, and notes on what is unusual about it.

    Raises ConfigError for a malformed source, DataError for a text that cannot be had, read or learned from,
    CheckpointError if the wanted text is not there or the vocabulary lacks characters of the text.
    """
    alternatives = [_Source.parse(source) for source in sources]
    passed_over = []
    # A resumed run looks through what lies on this machine before it asks the network.
    for source in sorted(alternatives, key=lambda s: wanted_sha256 is not None and s.url is not None):
        try:
            place, files, sha256 = source.find(wanted_sha256, say)
            break
        except Unavailable as reason:
            passed_over.append(f"{source.label} ({reason})")
    else:
        raise _nothing_left(", ".join(passed_over), wanted_sha256)

    texts = [_decode(file, content) for file, content in files.items()]
    text = "".join(texts)
    tokenizer = _tokenizer_for(text, place, vocabulary)
    ids = tokenizer.encode(text)
    bounds = list(accumulate(map(len, texts), initial=0))
    cuts = [start + (end - start) * 9 // 10 for start, end in pairwise(bounds)]
    train = Split(ids, tuple(zip(bounds[:-1], cuts, strict=True)))
    val = Split(ids, tuple(zip(cuts, bounds[1:], strict=True)))

    account = f"text: {place}, {len(text):,} characters, {len(set(text))} distinct"
    if passed_over:
        account += f"; passed over: {', '.join(passed_over)}"
    if source.name != alternatives[0].name:
        account += f"; losses on {source.name} do not compare with those on {alternatives[0].name}"
    for line in (account, *_notes(files.values(), text)):
        say(printable(line))
    return Corpus(source.name, sha256, len(text), tokenizer, train, val)


def check_sizes(corpus: Corpus, block_size: int) -> None:
    """Raise DataError unless both splits hold at least one window of `block_size` predictions."""
    splits = {"training": corpus.train, "validation": corpus.val}
    longest = {name: max(end - start for start, end in split.segments) for name, split in splits.items()}
    shorter = min(longest, key=longest.get)
    fits = longest[shorter] - 1
    if fits < block_size:
        raise DataError(
            f"{printable(corpus.name)}: the longest stretch of {shorter} text has {longest[shorter]:,} characters, "
            f"block_size {block_size} needs {block_size + 1:,}; "
            + (f"the largest block_size that fits is {fits}; set that or " if fits > 0 else "no block_size fits; ")
            + "take a longer text"
        )


@dataclass(frozen=True)
class _Source:
    """One alternative: where its text lies, and where it can be had if it does not lie there yet."""

    label: str
    path: Path
    url: str | None = None
    sha256: str | None = None

    @classmethod
    def parse(cls, source: str) -> "_Source":
        if match := _URL.fullmatch(source):
            url, name, sha256 = match.groups()
            return cls(url, Path("data", name, "input.txt"), url, sha256.lower())
        if "://" in source:
            raise ConfigError(
                f"data.sources: not a usable address: {printable(source)}; allowed is "
                "https://HOST/.../NAME/FILE#sha256= and 64 hex digits; for a file give its path"
            )
        if not source or "\0" in source:
            raise ConfigError("data.sources: an empty name, or one with a NUL; give a file, a folder or an address")
        return cls(source, Path(source))

    @property
    def name(self) -> str:
        return self.path.parent.name if self.path.name == "input.txt" else self.path.name

    def find(self, wanted: str | None, say: Callable[[str], None]) -> tuple[Path, dict[Path, bytes], str]:
        """Where the text lies, the bytes of its files and their digest; raises Unavailable, or DataError."""
        if wanted and self.sha256 not in (None, wanted):
            raise Unavailable(f"another text, SHA-256 {self.sha256}")
        for place in self._places():
            if (files := _read(place)) is not None:
                break
        else:
            if not self.url:
                raise Unavailable("no such file or folder")
            download(self.url, self.sha256, self.path, say)
            place, files = self.path, _read(self.path)
        sha256 = _digest(files.values())
        if sha256 != (self.sha256 or wanted or sha256):
            raise Unavailable(f"{place} holds another text, SHA-256 {sha256}")
        return place, files, sha256

    def _places(self) -> list[Path]:
        elsewhere = os.environ.get("HORNBOOK_CORPORA")
        match self.path.parts:
            case ("data", name, "input.txt") if elsewhere:
                return [self.path, Path(elsewhere, name, "input.txt")]
        return [self.path]


def _read(place: Path) -> dict[Path, bytes] | None:
    """The bytes of a file, or of each *.txt file of a folder, sorted by name; None where there is nothing."""
    try:
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        files = _text_files(place) if stat.S_ISDIR(place.stat().st_mode) else [place]
        return {file: _regular_bytes(file) for file in files}
    except OSError as error:
        raise DataError(
            f"{printable(error.filename or place)}: cannot be read: {error.strerror}; mend it, or name another source"
        ) from error


def _text_files(folder: Path) -> list[Path]:
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() == ".txt" and not f.name.startswith("."))
    if not files:
        raise DataError(f"{printable(folder)}: no text files; a folder's texts are its *.txt files")
    return files


def _regular_bytes(file: Path) -> bytes:
    if not stat.S_ISREG(file.stat().st_mode):
        raise DataError(f"{printable(file)}: not a regular file; only such can be a text; copy it to one")
    return file.read_bytes()


def _digest(contents: Iterable[bytes]) -> str:
    digests = [hashlib.sha256(content) for content in contents]
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(d.digest() for d in digests)).hexdigest()


def _decode(file: Path, content: bytes) -> str:
    mark = next(filter(content.startswith, _MARKS), b"")
    if not mark and _looks_like_utf16(content[:4096]):
        raise DataError(f"{printable(file)}: looks like UTF-16 without a byte order mark; {_ALLOWED}")
    encoding = _MARKS.get(mark, "utf-8")
    body = content[len(mark) :]
    try:
        return body.decode(encoding)
    except UnicodeDecodeError as error:
        line = body[: error.start].decode(encoding).count("\n") + 1
        raise DataError(
            f"{printable(file)}: not {encoding.upper()} at byte {len(mark) + error.start} (line {line}); {_ALLOWED}"
        ) from error


def _looks_like_utf16(head: bytes) -> bool:
    """Whether every other byte takes few values, zero among them: the upper halves of an alphabet's characters."""
    even, odd = set(head[::2]), set(head[1::2])
    return any(0 in upper and 4 * len(upper) <= len(lower) for upper, lower in ((even, odd), (odd, even)))


def _tokenizer_for(text: str, place: Path, vocabulary: str | None) -> CharTokenizer:
    if not text:
        raise DataError(f"{printable(place)}: 0 characters; need at least 10 * block_size + 1; take a longer text")
    own = CharTokenizer.from_text(text)
    if len(own) == 1:
        raise DataError(
            f"{printable(place)}: nothing to learn: {named(text[0])} is its only character; take another text"
        )
    if vocabulary is None:
        return own
    if missing := sorted(set(own.vocabulary) - set(vocabulary)):
        raise CheckpointError(
            f"{printable(place)}: {len(missing)} of its characters are not in the checkpoint's vocabulary: "
            f"{_few(map(named, missing))}; leave them out of the text, or start without the checkpoint"
        )
    return CharTokenizer(vocabulary)


def _notes(contents: Iterable[bytes], text: str) -> Iterator[str]:
    """What is unusual about a text and is kept, or left out, without an error."""
    if marked := sum(content.startswith(tuple(_MARKS)) for content in contents):
        yield f"note: the byte order mark at the beginning of {marked} file(s) is left out"
    if crlf := text.count("\r\n"):
        yield f"note: {crlf:,} lines end in \\r\\n, which is kept exactly"
    if controls := sorted(c for c in set(text) if unicodedata.category(c) == "Cc" and c not in "\t\n\r"):
        counts = (f"U+{ord(c):04X} {text.count(c):,} times" for c in controls)
        yield f"note: control characters are kept: {_few(counts)}"


def _few(things: Iterable[str]) -> str:
    """The first five of them in a list, and the number of the rest."""
    first, rest = (things := list(things))[:5], len(things) - 5
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def _nothing_left(passed_over: str, wanted: str | None) -> DataError | CheckpointError:
    if wanted:
        return CheckpointError(
            f"data.sources: the text changed since the checkpoint, which learnt from SHA-256 {wanted}; "
            f"there is {printable(passed_over)}; bring that text back, or start a new run"
        )
    return DataError(
        f"data.sources: no text can be had: {printable(passed_over)}; name a file, a folder or an address that is there"
    )
