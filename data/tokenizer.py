"""Characters to ids and back: a character's id is its place in the sorted string of all distinct
characters.
"""

import numpy as np

from common.errors import UserError, escape

FOLDED = (
    "\ufffd"  # the replacement character: it stands for every character that is too rare to learn
)


class UnknownCharacter(UserError):
    """A text holds a character that the vocabulary lacks."""


class CharTokenizer:
    """Encodes text as one id per character; `vocabulary`, a string, is its whole state.

    Raises ValueError for a vocabulary that is empty, not sorted by code point, or holds a character
    twice or half a surrogate pair.
    """

    def __init__(self, vocabulary: str):
        codes = code_points(vocabulary)
        if not vocabulary or (codes[1:] <= codes[:-1]).any():
            raise ValueError(
                "a vocabulary is one or more distinct characters, sorted by code point"
            )
        self.vocabulary = vocabulary
        self._codes = codes
        self.dtype = np.min_scalar_type(
            len(codes) - 1
        )  # the smallest of uint8, 16 and 32 that holds every id
        # Code point -> id, -1 for no character of ours; the last entry stands for every code point
        # above.
        self._ids = np.full(int(codes[-1]) + 2, -1, dtype=np.int32)
        self._ids[codes] = np.arange(len(codes))

    @classmethod
    def from_text(cls, text: str) -> "CharTokenizer":
        """The tokenizer whose vocabulary is exactly the characters of `text`."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.vocabulary)

    @property
    def start(self) -> str:
        """What a text is begun with where no prompt is given: a newline, else a space, else the
        first character.
        """
        return next((c for c in "\n " if c in self.vocabulary), self.vocabulary[0])

    def encode(self, text: str, fold: bool = False) -> np.ndarray:
        """One id per character, of `dtype`.

        A character that the vocabulary lacks is that of FOLDED with `fold` (which the vocabulary
        must hold then); without, the first one raises UnknownCharacter with its place counted from
        0.
        """
        ids = np.take(self._ids, code_points(text, errors="surrogatepass"), mode="clip")
        if ids.size and ids.min() < 0:
            if not fold:
                raise self._unknown(text, int(ids.argmin()))
            ids[ids < 0] = self._ids[ord(FOLDED)]
        return ids.astype(self.dtype)

    def decode(self, ids) -> str:
        """The text of `ids`: a sequence, array or CPU tensor of integers from 0 to
        len(self) - 1.
        """
        return self._codes[np.asarray(ids, dtype=np.int64)].tobytes().decode("utf-32-le")

    def _unknown(self, text: str, place: int) -> UnknownCharacter:
        shown = escape(self.vocabulary[:100]) + "..." * (len(self) > 100)
        return UnknownCharacter(
            f"not in the vocabulary: {named(text[place])} at {place}; "
            f"its {len(self)} characters are: {shown}; leave that character out or write another"
        )


def named(character: str) -> str:
    """A character as messages show it: `'é' (U+00E9)`."""
    return f"'{escape(character)}' (U+{ord(character):04X})"


def code_points(text: str, errors: str = "strict") -> np.ndarray:
    """The Unicode numbers of a text's characters, uint32."""
    return np.frombuffer(text.encode("utf-32-le", errors), dtype="<u4")
