"""Texts of any size, read in two passes with bounded memory: count characters, then encode them.

The results for a small text stay in memory. Those for a large text are stored in the disk cache,
under a name derived from the text's SHA-256 and everything else they depend on. So the next run
needs neither pass, and ids are read from disk when they are needed. Every pass checks the SHA-256
again, so that nothing is stored for a text that has changed since the start.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from io import BytesIO
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from common.errors import DataError
from data import disk_cache
from data.disk_cache import StoredIds
from data.text_files import MARKS, Text, byte_order_mark, decoded
from data.tokenizer import CharTokenizer, code_points

LARGE = 2**25  # bytes; texts of this size use the disk cache; smaller ones take under a second
CACHE_FORMAT = "2"


@dataclass(frozen=True)
class CharCounts:
    """Counts of each character, the length of each file, and how many lines end in \\r\\n."""

    counts: dict[str, int]
    lengths: list[int]
    crlf: int


@dataclass(frozen=True)
class StreamedText:
    """A text with the `encoding` and `newlines` to decode it by (see `text_files.decoded`)."""

    text: Text
    encoding: str = "utf-8"
    newlines: str = "keep"

    @property
    def is_large(self) -> bool:
        return self.text.size >= LARGE

    @property
    def marked_files(self) -> list[str]:
        """The files that begin with a byte order mark, each with the encoding that it names."""
        marks = {file.path: byte_order_mark(file) for file in self.text.files}
        return [f"{path} ({MARKS[mark].upper()})" for path, mark in marks.items() if mark]

    @cached_property
    def char_counts(self) -> CharCounts:
        if not self.is_large:
            return self._count()
        name = f"{self._key()}.json"
        if entry := disk_cache.get(name):
            return CharCounts(**json.loads(entry.read(0, entry.size)))
        counts = self._count()
        content = json.dumps(asdict(counts)).encode()
        disk_cache.put(name, len(content), lambda file: file.write(content))
        return counts

    def ids(self, tokenizer: CharTokenizer, map_unknown: bool) -> np.ndarray | StoredIds:
        """Return the ids of all files, concatenated and read-only; see `CharTokenizer.encode`."""
        if not self.is_large:
            buffer = BytesIO()
            self._encode(tokenizer, map_unknown, buffer)
            return np.frombuffer(buffer.getvalue(), tokenizer.dtype)
        name = f"{self._key(tokenizer.vocabulary)}.ids"
        size = sum(self.char_counts.lengths) * tokenizer.dtype.itemsize
        entry = disk_cache.get(name, size)
        if entry is None:
            entry = disk_cache.put(
                name, size, lambda file: self._encode(tokenizer, map_unknown, file)
            )
        return StoredIds(entry, tokenizer.dtype)

    def read_files(self) -> list[str]:
        """Return the characters of each file."""
        contents = [""] * len(self.text.files)
        for number, piece in self._pieces("reading"):
            contents[number] += piece
        return contents

    def _key(self, *more: str) -> str:
        parts = (CACHE_FORMAT, self.text.sha256, self.encoding, self.newlines, *more)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _count(self) -> CharCounts:
        counts, crlf = np.zeros(0x110000, dtype=np.int64), 0
        lengths = [0] * len(self.text.files)
        for number, piece in self._pieces("counting"):
            found = np.bincount(code_points(piece, errors="surrogatepass"))
            counts[: len(found)] += found
            lengths[number] += len(piece)
            crlf += piece.count("\r\n")
        if counts[0xD800:0xE000].any():
            raise DataError(
                f"{self.text.path}: contains surrogates, which {self.encoding.upper()} "
                "can encode but no text may contain; convert it: iconv -f ENCODING -t UTF-8"
            )
        present = {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}
        return CharCounts(present, lengths, crlf)

    def _encode(self, tokenizer: CharTokenizer, map_unknown: bool, file: BinaryIO) -> None:
        for _, piece in self._pieces("encoding"):
            file.write(tokenizer.encode(piece, map_unknown))

    def _pieces(self, activity: str) -> Iterator[tuple[int, str]]:
        """Yield each piece of the text with its file's index; show a bar after 1 second."""
        options = {"unit": "B", "unit_scale": True, "leave": False, "delay": 1, "disable": None}
        with tqdm(total=self.text.size, desc=activity, **options) as bar:
            for number, file in enumerate(self.text.files):
                for piece in decoded(file, self.encoding, self.newlines, bar.update):
                    yield number, piece
