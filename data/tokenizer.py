"""The character tokenizer: a character's id is its index in the vocabulary."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from common.errors import UserError
from common.words import quoted_character

CHUNK = 2**20  # characters at a time, because temporary arrays take 4 to 8 bytes for each
# the replacement character: in a vocabulary, it stands for every character that is not in it
UNK = "\ufffd"


class UnknownCharacter(UserError):
    """A character that is not in the vocabulary."""


class CharTokenizer:
    """A mapping between characters and ids, defined by the string `vocabulary` alone.

    A new vocabulary is sorted by code point; characters that are added later are appended.
    Raises ValueError for a vocabulary that is empty, or contains a duplicate or a surrogate.
    """

    def __init__(self, vocabulary: str):
        # raises for a surrogate, which is half a character
        codes = code_points(vocabulary)
        if not vocabulary or len(set(vocabulary)) < len(vocabulary):
            raise ValueError("the vocabulary must be one or more distinct characters")
        self.vocabulary = vocabulary
        self.dtype = np.min_scalar_type(len(self) - 1)  # the smallest unsigned type for all ids

        self._code_points = codes
        # code point -> id; unknown code points have the id of UNK, or -1. The last entry is for all
        # larger code points, which `encode` clips to it.
        self._id_of = np.full(int(codes.max()) + 2, vocabulary.find(UNK), dtype=np.int32)
        self._id_of[codes] = np.arange(len(self))

    @classmethod
    def from_text(cls, text: str) -> "CharTokenizer":
        """Build the tokenizer whose vocabulary is the characters of a text."""
        # sorted, as in nanoGPT
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.vocabulary)

    def in_known_form(self, text: str) -> str:
        """Return a text in the Unicode form of which the vocabulary lacks the fewest characters.

        An accented letter is one code point in NFC, two in NFD, which macOS likes. inKnownForm() in
        page/text.js does the same.
        """
        forms = (text, unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text))
        return min(forms, key=lambda form: sum(c not in self.vocabulary for c in form))

    @property
    def start_character(self) -> str:
        """The character that starts a text without a prompt: newline, space, or the first one."""
        return next((c for c in "\n " if c in self.vocabulary), self.vocabulary[0])

    def encode(self, text: str) -> np.ndarray:
        """Return one id per character, of `dtype`. Unknown characters get the id of UNK.

        If the vocabulary lacks UNK, raises UnknownCharacter for the first unknown character, with
        its position, counted from 0.
        """
        ids = np.empty(len(text), self.dtype)
        for start, chunk in chunks(text):
            codes = code_points(chunk, errors="surrogatepass")
            chunk_ids = np.take(self._id_of, codes, mode="clip")
            if chunk_ids.min() < 0:
                position, known = start + int(chunk_ids.argmin()), self.vocabulary
                raise UnknownCharacter(
                    f"not in the vocabulary: {quoted_character(text[position])} at position "
                    f"{position}; the {len(known)} known characters are: {known[:100]}"
                    f"{'...' * (len(known) > 100)}; remove or replace that character"
                )
            ids[start : start + len(chunk_ids)] = chunk_ids
        return ids

    def decode(self, ids) -> str:
        """Return the text of a sequence, array or CPU tensor of ids."""
        # the bytes of the code points are the text in UTF-32
        return self._code_points[np.asarray(ids, dtype=np.int64)].tobytes().decode("utf-32-le")


def code_points(text: str, errors: str = "strict") -> np.ndarray:
    """Return the Unicode code points of a text, uint32."""
    # UTF-32 stores each character as its code point, in four bytes
    return np.frombuffer(text.encode("utf-32-le", errors), dtype="<u4")


def count_characters(texts: Iterable[str]) -> Counter[str]:
    """Count each character of several texts."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in texts:
        for _, chunk in chunks(text):
            chunk_counts = np.bincount(code_points(chunk))
            counts[: len(chunk_counts)] += chunk_counts  # ends at the chunk's largest code point
    return Counter({chr(code): int(counts[code]) for code in np.flatnonzero(counts)})


def chunks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the start and the characters of each chunk of a text."""
    for start in range(0, len(text), CHUNK):
        yield start, text[start : start + CHUNK]
