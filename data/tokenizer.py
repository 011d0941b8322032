"""Characters <-> ids: a character's id is its index in the vocabulary."""

import sys

import numpy as np

from common.console import UserError
from common.messages import quoted_character

# Characters that are encoded at a time. Their code points and ids are temporary arrays of 4 bytes
# each: those of a whole text in ASCII would be eight times as large as the text.
CHUNK = 2**20


class CharTokenizer:
    """A mapping between characters and ids, defined by the string `vocabulary` alone.

    A new vocabulary is sorted by code point, as in nanoGPT; characters that are added later are
    appended. Raises ValueError for a vocabulary that is empty, or contains a duplicate or a
    surrogate.
    """

    def __init__(self, vocabulary: str):
        self._code_points = code_points(vocabulary)  # raises for a surrogate, half a character
        if not vocabulary or len(set(vocabulary)) < len(vocabulary):
            raise ValueError("the vocabulary must be one or more distinct characters")
        self.vocabulary = vocabulary
        # code point -> id, or -1 for an unknown one; the last entry is for all larger ones
        self._id_of = np.full(int(self._code_points.max()) + 2, -1, np.int32)
        self._id_of[self._code_points] = np.arange(len(self))

    def __len__(self) -> int:
        return len(self.vocabulary)

    @property
    def start_character(self) -> str:
        """The character that starts a text without a prompt: newline, space, or the first one."""
        return next((c for c in "\n " if c in self.vocabulary), self.vocabulary[0])

    def encode(self, text: str) -> np.ndarray:
        """Return one id per character; raise UserError for an unknown character."""
        ids = np.empty(len(text), np.min_scalar_type(len(self) - 1))  # the smallest unsigned type
        for start in range(0, len(text), CHUNK):
            codes = code_points(text[start : start + CHUNK])
            chunk = np.take(self._id_of, codes, mode="clip")
            if chunk.min() < 0:
                unknown = quoted_character(text[start + int(chunk.argmin())])
                raise UserError(f"not in the vocabulary: {unknown}")
            ids[start : start + len(chunk)] = chunk
        return ids

    def decode(self, ids) -> str:
        """Return the text of a sequence, array or CPU tensor of ids."""
        # the bytes of the code points are the text in UTF-32
        return self._code_points[np.asarray(ids, dtype=np.int64)].tobytes().decode("utf-32-le")


def distinct_characters(text: str) -> set[str]:
    """Return the characters of a text, as `set(text)` does, but in a fraction of its time."""
    found = np.zeros(sys.maxunicode + 1, bool)
    for start in range(0, len(text), CHUNK):
        found[code_points(text[start : start + CHUNK])] = True
    return set(map(chr, np.flatnonzero(found)))


def code_points(text: str) -> np.ndarray:
    """Return the Unicode code points of a text, uint32."""
    # UTF-32 stores each character as its code point, in four bytes
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
