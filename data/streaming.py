"""A text of any size, in two passes that hold a piece of it at a time: one counts its characters,
one encodes them.

What they find of a small text stays in memory. Of a large one it is kept in the cache, under a name
made of the text's SHA-256 and all else that it depends on, so the next run starts without a pass;
the ids are read there through a memory map. Every pass checks that SHA-256 again, so nothing is
ever kept of a text that changed meanwhile.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from io import BytesIO
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from common.errors import DataError, escape
from data import disk_cache
from data.text_files import Text, decoded, mark_of
from data.tokenizer import CharTokenizer, code_points

LARGE = (
    2**25
)  # bytes of a text from which on the cache is used; below, both passes take a fraction of a second
FORMAT = "1"  # of what is kept


@dataclass(frozen=True)
class Census:
    """How often each character occurs in a text, the characters of each file, and the lines that
    end in \\r\\n.
    """

    counts: dict[str, int]
    lengths: list[int]
    crlf: int


@dataclass(frozen=True)
class Passes:
    """A text and how its bytes are read: `encoding` and `newlines` as `decoded` takes them."""

    text: Text
    encoding: str = "utf-8"
    newlines: str = "keep"

    @property
    def is_large(self) -> bool:
        return self.text.size >= LARGE

    @property
    def marked(self) -> int:
        """How many files begin with a byte order mark."""
        return sum(mark_of(file) != b"" for file in self.text.files)

    @cached_property
    def census(self) -> Census:
        """Counted once."""
        if not self.is_large:
            return self._count()
        name = f"{self._key()}.json"
        if known := disk_cache.get(name):
            with suppress(ValueError, TypeError):  # of a file that was damaged
                return Census(**json.loads(known.read_bytes()))
        census = self._count()
        content = json.dumps(asdict(census)).encode()
        disk_cache.put(name, len(content), lambda file: file.write(content))
        return census

    def ids(self, tokenizer: CharTokenizer, fold: bool) -> np.ndarray:
        """The ids of all files, one after the other, as `CharTokenizer.encode` gives them; not to
        be written to.
        """
        if not self.is_large:
            memory = BytesIO()
            self._encode(tokenizer, fold, memory)
            return np.frombuffer(memory.getvalue(), tokenizer.dtype)
        name = f"{self._key(tokenizer.vocabulary)}.ids"
        size = sum(self.census.lengths) * tokenizer.dtype.itemsize
        path = disk_cache.get(name, size) or disk_cache.put(
            name, size, lambda file: self._encode(tokenizer, fold, file)
        )
        return np.asarray(np.memmap(path, tokenizer.dtype, mode="r"))

    def _key(self, *more: str) -> str:
        parts = (FORMAT, self.text.sha256, self.encoding, self.newlines, *more)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _count(self) -> Census:
        counts, crlf = np.zeros(0x110000, dtype=np.int64), 0
        lengths = [0] * len(self.text.files)
        for number, piece in self._pieces("counting"):
            found = np.bincount(code_points(piece, errors="surrogatepass"))
            counts[: len(found)] += found
            lengths[number] += len(piece)
            crlf += piece.count("\r\n")
        if counts[0xD800:0xE000].any():
            raise DataError(
                f"{escape(self.text.place)}: holds halves of surrogate pairs, which "
                f"{self.encoding.upper()} can "
                "write and no text may hold; convert it: iconv -f ENCODING -t UTF-8"
            )
        return Census(
            {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}, lengths, crlf
        )

    def _encode(self, tokenizer: CharTokenizer, fold: bool, file: BinaryIO) -> None:
        for _, piece in self._pieces("encoding"):
            file.write(tokenizer.encode(piece, fold))

    def _pieces(self, doing: str) -> Iterator[tuple[int, str]]:
        """Each piece of the text with the number of its file; a bar on the terminal where that
        takes over a second.
        """
        words = {
            "desc": doing,
            "unit": "B",
            "unit_scale": True,
            "leave": False,
            "delay": 1,
            "disable": None,
        }
        with tqdm(total=self.text.size, **words) as bar:
            for number, file in enumerate(self.text.files):
                for piece in decoded(file, self.encoding, self.newlines, bar.update):
                    yield number, piece
