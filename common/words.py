"""The words of messages: values quoted, texts escaped and shortened, things counted and listed."""

import difflib
import re
import unicodedata
from collections.abc import Iterable

CONTROL = "[\0-\x1f\x7f-\x9f\ud800-\udfff]"  # a control character or a surrogate
BLANK_NAMES = {"\n": "newline", "\t": "tab", " ": "space"}
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # invisible characters outside categories C, M, Z


def escape_controls(text: object, keep: str = "") -> str:
    """Escape control characters and surrogates, for example to `\\x1b`, except those in `keep`.

    Otherwise a file name, a config key or generated text could control the terminal.
    """

    def escaped(match: re.Match) -> str:
        character = match[0]
        return character if character in keep else character.encode("unicode_escape").decode()

    return re.sub(CONTROL, escaped, str(text))


def printable(lines: Iterable[object]) -> str:
    """Escape some lines, including the newlines in them, and join them."""
    return "\n".join(map(escape_controls, lines))


def shorten(text: str, limit: int) -> str:
    """Leave out the middle of a text of more than `limit` characters."""
    # the beginning of an error says what it is, the end often what is wrong
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def quoted(value: object) -> str:
    """Return a short form of a value for a message, with strings quoted."""
    if isinstance(value, str):
        return f"'{value if len(value) <= 80 else value[:77] + '...'}'"
    if isinstance(value, tuple):
        return f"[{', '.join(map(quoted, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (dict, list)):  # not the content, which YAML's aliases can nest very deep
        return "a mapping" if isinstance(value, dict) else "a list"
    return str(value)


def quoted_character(character: str) -> str:
    """Return a character as messages show it: `'é' (U+00E9)`."""
    return f"'{character}' (U+{ord(character):04X})"


def character_name(character: str) -> str:
    """Return a character, or a name for one that is invisible on its own: `space`, `U+00A0`.

    characterName() in page/text.js does the same.
    """
    # C: controls, joiners, tags; M: combining marks; Z: spaces
    blank = unicodedata.category(character)[0] in "CMZ" or character in FILLERS
    return BLANK_NAMES.get(character) or (f"U+{ord(character):04X}" if blank else character)


def plural(count: int, noun: str) -> str:
    """Return `1 item`, `2 items`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def first_few(items: Iterable[str]) -> str:
    """Join the first five items, followed by the number of the others."""
    items = list(items)
    more = f" and {len(items) - 5:,} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def did_you_mean(given: str, known: dict[str, str], otherwise: str) -> str:
    """Return `did you mean X?` for the known name nearest to `given`, or `otherwise`.

    `known` maps names to what is printed for them.
    """
    # a typo, or the beginning of a name
    near = difflib.get_close_matches(given[:99], known, n=1)
    near = near or [name for name in known if given and name.startswith(given)]
    return f"did you mean {known[near[0]]}?" if near else otherwise
