"""The character tokenizer: a character's id is its index in the vocabulary."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from common.errors import UserError

SLICE = 2**20  # characters at a time: what is computed from a text is larger than the text
NAMES = {"\n": "newline", "\t": "tab", " ": "space"}
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol that are blank
UNK = "\ufffd"  # the replacement character, for all characters that are too rare to learn


class UnknownCharacter(UserError):
    """A character that is not in the vocabulary."""


class CharTokenizer:
    """A mapping between characters and ids, defined by the string `vocabulary` alone.

    A new vocabulary is sorted by code point; characters that are added to it later come after them.
    Raises ValueError for a vocabulary that is empty, or contains a duplicate or a surrogate.
    """

    def __init__(self, vocabulary: str):
        # a surrogate is half a character, and code_points refuses it
        codes = code_points(vocabulary)
        if not vocabulary or len(set(vocabulary)) < len(vocabulary):
            raise ValueError("the vocabulary must be one or more distinct characters")
        self.vocabulary = vocabulary
        self.dtype = np.min_scalar_type(len(codes) - 1)  # the smallest unsigned type for all ids

        # to decode: id -> code point
        self._codes = codes
        # to encode: code point -> id, or -1; the last entry stands for all higher code points
        self._ids = np.full(int(codes.max()) + 2, -1, dtype=np.int32)
        self._ids[codes] = np.arange(len(codes))

    @classmethod
    def from_text(cls, text: str) -> "CharTokenizer":
        """Build the tokenizer whose vocabulary is the characters of a text."""
        # as nanoGPT does: the order of the characters in the text plays no part
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.vocabulary)

    @property
    def start(self) -> str:
        """The character that starts a text without a prompt: newline, space, or the first one."""
        return next((c for c in "\n " if c in self.vocabulary), self.vocabulary[0])

    def encode(self, text: str, map_unknown: bool = False) -> np.ndarray:
        """Return one id per character, of `dtype`.

        With `map_unknown`, unknown characters map to UNK, which must be in the vocabulary;
        otherwise the first one raises UnknownCharacter, with its position counted from 0.
        """
        # a byte for each character, if there are at most 256 different ones
        ids = np.empty(len(text), self.dtype)
        for start, piece in slices(text):
            # one look-up in the table for each slice; "clip" takes the last entry for the rest
            found = np.take(self._ids, code_points(piece, errors="surrogatepass"), mode="clip")
            if found.min() < 0:
                if not map_unknown:
                    raise self._unknown(text, start + int(found.argmin()))
                found[found < 0] = self._ids[ord(UNK)]
            ids[start : start + len(found)] = found
        return ids

    def decode(self, ids) -> str:
        """Return the text of a sequence, array or CPU tensor of ids."""
        # look up all code points at once: as bytes they are the text in UTF-32
        return self._codes[np.asarray(ids, dtype=np.int64)].tobytes().decode("utf-32-le")

    def _unknown(self, text: str, position: int) -> UnknownCharacter:
        where = f"not in the vocabulary: {describe(text[position])} at position {position}"
        # a letter with its accent is one code point in NFC, two in NFD: does the other form fit?
        letter = text[max(0, position - 1) : position + 1]
        for form in ("NFC", "NFD"):
            if set(unicodedata.normalize(form, letter)) <= set(self.vocabulary):
                return UnknownCharacter(
                    f"{where}; the vocabulary has its other Unicode form; normalize the text to "
                    f"{form}"
                )

        # which characters does it know?
        vocabulary = self.vocabulary[:100] + "..." * (len(self) > 100)
        return UnknownCharacter(
            f"{where}; the {len(self)} known characters are: {vocabulary}; remove or replace that "
            "character"
        )


def character_name(character: str) -> str:
    """Return a character, or the name of one that cannot be seen alone: `space`, `U+00A0`.

    characterName() in page/text.js does the same.
    """
    # C: controls, joiners, tags; M: combining marks; Z: spaces
    blank = unicodedata.category(character)[0] in "CMZ" or character in FILLERS
    return NAMES.get(character) or (f"U+{ord(character):04X}" if blank else character)


def describe(character: str) -> str:
    """Return a character as messages show it: `'é' (U+00E9)`."""
    return f"'{character}' (U+{ord(character):04X})"


def code_points(text: str, errors: str = "strict") -> np.ndarray:
    """Return the Unicode code points of a text, uint32."""
    # UTF-32 has four bytes for each character: its code point
    return np.frombuffer(text.encode("utf-32-le", errors), dtype="<u4")


def count_characters(texts: Iterable[str]) -> Counter[str]:
    """Count each character of several texts."""
    # one counter for each code point of Unicode
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in texts:
        for _, piece in slices(text):
            found = np.bincount(code_points(piece))
            counts[: len(found)] += found  # found ends at the largest code point of the piece
    return Counter({chr(code): int(counts[code]) for code in np.flatnonzero(counts)})


def slices(text: str) -> Iterator[tuple[int, str]]:
    """Yield the start and the characters of each slice of a text."""
    for start in range(0, len(text), SLICE):
        yield start, text[start : start + SLICE]
