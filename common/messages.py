"""The words of messages: values quoted, texts escaped, things counted and listed."""

import difflib
import re
import reprlib
from collections.abc import Iterable

CONTROL = re.compile("[\0-\x08\n-\x1f\x7f-\x9f\ud800-\udfff]")  # but tabs; and surrogates
QUOTED = reprlib.Repr()
QUOTED.maxstring = 80
quoted = QUOTED.repr  # a short form of a value for a message, with strings quoted


def printable(text: object) -> str:
    """Escape the control characters of a line, except tabs, for example to `\\x1b`.

    Otherwise a file name, a config key or generated text could control the terminal.
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def quoted_character(character: str) -> str:
    """Return a character as messages show it: `'é' (U+00E9)`."""
    return f"'{character}' (U+{ord(character):04X})"


def counted(count: int, noun: str) -> str:
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
