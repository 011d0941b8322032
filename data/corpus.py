"""From a list of sources to the ids of a training and a validation split: the first source that can be had is taken."""

import codecs
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from configs.errors import CheckpointError, DataError, printable
from data.download import Unavailable
from data.sources import Source, Text
from data.tokenizer import CharTokenizer, named

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

    def stretch(self, predictions: int) -> "Split":
        """The beginning of this split with so many predictions, at least one: a fixed text to measure a loss on."""
        segments, left = [], max(1, predictions)
        for start, end in self.segments:
            end = min(end, start + left + 1) if left else start
            segments.append((start, end))
            left -= max(0, end - start - 1)
        return Split(self.ids, tuple(segments))


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    name        for people: `tinyshakespeare`, `plays`, `book.txt`
    sha256      of its bytes, as `data.sources.Text` has it
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
    alternatives = [Source.parse(source) for source in sources]
    source, found, passed_over = _first_available(alternatives, wanted_sha256, say)
    texts, marks = zip(*map(_decode, found.files), strict=True)
    text = "".join(texts)
    tokenizer = _tokenizer_for(text, found.place, vocabulary)
    train, val = _split(tokenizer.encode(text), list(map(len, texts)))

    account = f"text: {found.place}, {len(text):,} characters, {len(set(text))} distinct"
    if passed_over:
        account += f"; passed over: {', '.join(passed_over)}"
    if source.name != alternatives[0].name:
        account += f"; losses on {source.name} do not compare with those on {alternatives[0].name}"
    for line in (account, *_notes(text, marks)):
        say(printable(line))
    return Corpus(source.name, found.sha256, len(text), tokenizer, train, val)


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


def _first_available(
    sources: Sequence[Source], wanted: str | None, say: Callable[[str], None]
) -> tuple[Source, Text, list[str]]:
    """The first source that can be had, its text, and those passed over, each with the reason."""
    passed_over = []
    # A resumed run looks through what lies on this machine before it asks the network.
    for source in sorted(sources, key=lambda s: wanted is not None and s.url is not None):
        try:
            return source, source.find(wanted, say), passed_over
        except Unavailable as reason:
            passed_over.append(f"{source.label} ({reason})")
    reasons = printable(", ".join(passed_over))
    if wanted:
        raise CheckpointError(
            f"data.sources: the text changed since the checkpoint, which learnt from SHA-256 {printable(wanted)}; "
            f"found instead: {reasons}; bring that text back, or start a new run"
        )
    raise DataError(f"data.sources: no text can be had: {reasons}; name a file, a folder or an address that is there")


def _decode(file: Path) -> tuple[str, bytes]:
    """The text of `file` with every line end as it is, and the byte order mark that stood before it."""
    content = file.read_bytes()
    mark = next(filter(content.startswith, _MARKS), b"")
    if not mark and _looks_like_utf16(content[:4096]):
        raise DataError(f"{printable(file)}: looks like UTF-16 without a byte order mark; {_ALLOWED}")
    encoding = _MARKS.get(mark, "utf-8")
    body = content[len(mark) :]
    try:
        return body.decode(encoding), mark
    except UnicodeDecodeError as error:
        line = body[: error.start].decode(encoding).count("\n") + 1
        raise DataError(
            f"{printable(file)}: not {encoding.upper()} at byte {len(mark) + error.start} (line {line}); {_ALLOWED}"
        ) from error


def _looks_like_utf16(head: bytes) -> bool:
    """Whether every other byte takes few values, zero among them: the upper halves of an alphabet's characters."""
    even, odd = set(head[::2]), set(head[1::2])
    return any(0 in upper and 4 * len(upper) <= len(lower) for upper, lower in ((even, odd), (odd, even)))


def _split(ids: np.ndarray, lengths: Sequence[int]) -> tuple[Split, Split]:
    """The first 90 % of each file to train on, the rest to validate on."""
    files = list(pairwise(accumulate(lengths, initial=0)))
    cuts = [start + (end - start) * 9 // 10 for start, end in files]
    train = tuple((start, cut) for (start, _), cut in zip(files, cuts, strict=True))
    val = tuple((cut, end) for (_, end), cut in zip(files, cuts, strict=True))
    return Split(ids, train), Split(ids, val)


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


def _notes(text: str, marks: Sequence[bytes]) -> Iterator[str]:
    """What is unusual about a text and no error."""
    if marked := sum(map(bool, marks)):
        yield f"note: a byte order mark begins {marked} file(s) and is left out"
    if crlf := text.count("\r\n"):
        yield f"note: {crlf:,} lines end in \\r\\n, which is kept exactly"
    if controls := sorted(c for c in set(text) if unicodedata.category(c) == "Cc" and c not in "\t\n\r"):
        counts = (f"U+{ord(c):04X} {text.count(c):,} times" for c in controls)
        yield f"note: control characters are kept: {_few(counts)}"


def _few(things: Iterable[str]) -> str:
    """The first five of them in a list, and the number of the rest."""
    first, rest = (things := list(things))[:5], len(things) - 5
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
