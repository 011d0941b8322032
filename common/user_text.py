"""Text that the user gives to sample.py: a prompt or a typed line. Both are read as UTF-8."""

import re
import sys

from common.console import print_text
from common.errors import ConfigError, DataError
from common.files import read_regular

MAX_BYTES = 2**28
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
WRITTEN = {character: f"\\{letter}" for letter, character in ESCAPES.items()}


def read_prompt(prompt: str) -> str:
    """Return the text of --prompt: the option itself, the content of a file, or standard input."""
    if prompt == "-":
        content = _limited(sys.stdin.buffer.read(MAX_BYTES + 1))
        return _decode(content, "standard input")
    if prompt.startswith("FILE:"):
        return _read_file(prompt.removeprefix("FILE:"))
    return unescape(prompt)


def _read_file(name: str) -> str:
    """Read the file of a prompt; raise ConfigError if it cannot be read."""
    try:
        content = read_regular(name, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}; name a text file that can be read") from None
    return _decode(content, name)


def check_readable(name: str) -> None:
    """Raise DataError if a file cannot be read, whatever its encoding and size."""
    try:
        read_regular(name, sys.maxsize, only_first=1)
    except OSError as error:
        raise DataError(f"{name}: {error.strerror}; name a text file that can be read") from None


def read_line() -> str | None:
    """Read the next line from standard input, with a prompt on a terminal; None at the end."""
    if sys.stdin.isatty():
        print_text("> ")
    line = _limited(sys.stdin.buffer.readline(MAX_BYTES + 1))
    if not line and sys.stdin.isatty():
        print_text("\n")
    return _decode(line, "standard input").rstrip("\r\n") if line else None


def universal_newlines(text: str) -> str:
    r"""Replace the line ends \r\n and \r with \n, as Python's text mode does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def unescape(text: str) -> str:
    r"""Replace \n, \t, \r and \\ with the characters they stand for; \r ends a line as \n does."""
    replaced = re.sub(r"\\([ntr\\])", lambda match: ESCAPES[match[1]], text)
    return universal_newlines(replaced)


def with_escapes(text: str) -> str:
    r"""Write newlines, tabs, carriage returns and backslashes as `unescape` reads them."""
    return re.sub(r"[\n\t\r\\]", lambda match: WRITTEN[match[0]], text)


def _limited(content: bytes) -> bytes:
    """Return what was read from standard input; raise ConfigError if it is over the limit."""
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"standard input: more than {MAX_BYTES:,} bytes; at most {MAX_BYTES:,} are read; "
            "give a shorter text"
        )
    return content


def _decode(content: bytes | bytearray, source: str) -> str:
    """Decode UTF-8; raise ConfigError if it is not."""
    try:
        return universal_newlines(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: not UTF-8 at byte {error.start}; iconv -t UTF-8 converts it"
        ) from None
