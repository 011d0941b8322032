"""Texts of any size, read in two passes with bounded memory: count characters, then encode them.

The results for a small text stay in memory. Those for a large text are stored in the disk cache,
under a name derived from the text's SHA-256 and everything else they depend on. So the next run
needs neither pass, and ids are read from disk when they are needed. Every pass checks the SHA-256
again, so that nothing is stored for a text that has changed since the start.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.errors import DataError
from data.disk_cache import StoredArray, load_or_make
from data.text_files import MARKS, File, byte_order_mark, decoded
from data.tokenizer import CharTokenizer, code_points

# bytes; texts of at least this size use the disk cache; smaller ones take under a second
MIN_CACHED_SIZE = 2**25
CACHE_FORMAT = "2"


@dataclass(frozen=True)
class CharCounts:
    """Counts of each character, the length of each file, and how many lines end in \\r\\n."""

    counts: dict[str, int]
    lengths: list[int]
    crlf: int


@dataclass(frozen=True)
class Text:
    """One or more files, in order, and how to decode them (see `text_files.decoded`).

    name   for messages: `tinyshakespeare`, `plays`, `book.txt`
    path   the file, folder or pattern that the files come from
    notes  on the sources before it, which are not available
    """

    name: str
    path: Path
    files: Sequence[File]
    encoding: str
    newlines: str
    notes: Sequence[str] = ()

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files)

    @property
    def is_large(self) -> bool:
        return self.size >= MIN_CACHED_SIZE

    @property
    def sha256(self) -> str:
        """The SHA-256 of a single file. For several files: that of their concatenated SHA-256s.

        It depends on the contents and on where each file ends, not on file names.
        """
        digests = [file.digest for file in self.files]
        if len(digests) > 1:
            return hashlib.sha256(b"".join(digests)).hexdigest()
        return digests[0].hex()

    @property
    def marked_files(self) -> list[str]:
        """The files that begin with a byte order mark, each with the encoding that it names."""
        marks = {file.path: byte_order_mark(file) for file in self.files}
        return [f"{path} ({MARKS[mark].upper()})" for path, mark in marks.items() if mark]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The (start, end) positions of each file in the characters of all files."""
        return tuple(pairwise(accumulate(self.char_counts.lengths, initial=0)))

    @cached_property
    def char_counts(self) -> CharCounts:
        if not self.is_large:
            return self._count()
        stored = load_or_make(
            f"{self._key()}.json",
            np.dtype(np.uint8),
            lambda: [json.dumps(asdict(self._count())).encode()],
        )
        return CharCounts(**json.loads(stored[:].tobytes()))

    def ids(self, tokenizer: CharTokenizer, map_unknown: bool) -> np.ndarray | StoredArray:
        """Return the ids of all files, concatenated and read-only; see `CharTokenizer.encode`."""

        def encoded() -> Iterator[np.ndarray]:
            for _, piece in self._pieces("encoding"):
                yield tokenizer.encode(piece, map_unknown)

        if not self.is_large:
            return np.frombuffer(b"".join(encoded()), tokenizer.dtype)
        size = sum(self.char_counts.lengths) * tokenizer.dtype.itemsize
        name = f"{self._key(tokenizer.vocabulary)}.ids"
        return load_or_make(name, tokenizer.dtype, encoded, size)

    def read_files(self) -> list[str]:
        """Return the characters of each file."""
        contents = [""] * len(self.files)
        for number, piece in self._pieces("reading"):
            contents[number] += piece
        return contents

    def _key(self, *more: str) -> str:
        parts = (CACHE_FORMAT, self.sha256, self.encoding, self.newlines, *more)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _count(self) -> CharCounts:
        counts, crlf = np.zeros(0x110000, dtype=np.int64), 0
        lengths = [0] * len(self.files)
        for number, piece in self._pieces("counting"):
            found = np.bincount(code_points(piece, errors="surrogatepass"))
            counts[: len(found)] += found
            lengths[number] += len(piece)
            crlf += piece.count("\r\n")
        if counts[0xD800:0xE000].any():
            raise DataError(
                f"{self.path}: contains surrogates, which {self.encoding.upper()} "
                "can encode but no text may contain; convert it: iconv -f ENCODING -t UTF-8"
            )
        present = {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}
        return CharCounts(present, lengths, crlf)

    def _pieces(self, activity: str) -> Iterator[tuple[int, str]]:
        """Yield each piece of the text with its file's index; show a bar after 1 second."""
        options = {"unit": "B", "unit_scale": True, "leave": False, "delay": 1, "disable": None}
        with tqdm(total=self.size, desc=activity, **options) as bar:
            for number, file in enumerate(self.files):
                for piece in decoded(file, self.encoding, self.newlines, bar.update):
                    yield number, piece
