"""Settings: dataclass fields with a meaning and a range, and the function that checks a value."""

import dataclasses
import math
import re
from contextlib import contextmanager
from dataclasses import Field, fields
from operator import ge, gt, le, lt
from typing import NewType, get_args

from common.console import ConfigError
from common.messages import quoted

LocalPath = NewType("LocalPath", str)  # a path on this machine
Source = NewType("Source", str)  # of a text: a path, a pattern or a URL with its SHA-256
TEXT_URL = re.compile(r"(?i)(https://[^\s#]+/(\w[\w.-]*)/(\w[\w.-]*))#sha256=([0-9a-f]{64})")

# what double quotes of YAML make of a path: "D:\notes" has a newline, "D:\Plays" a U+2029
UNESCAPED = re.compile("[\a-\r]|^[A-Za-z]:.*[\x1b\x85\xa0\u2028\u2029]")

TYPE_NAMES = {
    int: "an integer", float: "a number", bool: "true or false", str: "a string",
    LocalPath: "a path on this machine",
    Source: "a path, a pattern or https://HOST/FOLDER/FILE#sha256=<64 hex digits>",
}  # fmt: skip
LIMITS = {"at_least": ge, "more_than": gt, "at_most": le, "less_than": lt}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
ESCAPE_OF = {character: f"\\{letter}" for letter, character in ESCAPES.items()}


def setting(
    default: object, meaning: str, choices: tuple = (), fixed: bool = False, **limits: float
) -> Field:
    """Declare a setting: a dataclass field with a meaning, choices and limits.

    The limits are those of LIMITS: `at_least=0, less_than=1`. A number may have choices too:
    `int | str` with choices ("auto",). A setting whose default is None is optional, one whose
    default is a tuple is a list of strings. A `fixed` setting cannot change in a run.
    """
    metadata = {"meaning": meaning, "choices": choices, "limits": limits, "fixed": fixed}
    return dataclasses.field(default=default, metadata=metadata)


def fields_of(*sections: type) -> dict[str, Field]:
    """Return the settings of dataclasses by name; all names differ."""
    return {f.name: f for section in sections for f in fields(section) if f.metadata}


def value_type(field: Field) -> type:
    """Return the type of a value that is not a choice, and of each value of a list."""
    return (get_args(field.type) or [field.type])[0]


def describe_allowed(field: Field) -> str:
    """Describe the values that a setting may have: `auto or a number of at least 0`."""
    choices, limits, type_ = field.metadata["choices"], field.metadata["limits"], value_type(field)
    if isinstance(field.default, tuple):
        return f"{TYPE_NAMES[type_]}, or several"
    if type_ is str and choices:
        return f"one of {', '.join(choices)}"
    words = " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())
    return " or ".join([*choices, TYPE_NAMES[type_] + (words and f" of {words}")])


def parse_value(field: Field, value: object) -> object:
    """Return a value, or its text, in the type of its setting: "6.0" as 6, a list as a tuple.

    Nothing is guessed: `on` is not true. Raises ConfigError with the allowed values.
    """
    value = tuple(value) if isinstance(value, list) else value  # JSON and YAML have no tuples
    is_path = value_type(field) in (LocalPath, Source)
    for text in map(str, value if isinstance(value, tuple) else (value,)):
        if re.fullmatch("'.+'", text):  # the shell of Windows leaves them where they are
            raise ConfigError(f"{field.name}: {text}: the quotes are part of it; use double quotes")
        if is_path and UNESCAPED.search(text):
            raise ConfigError(f"{field.name}: {quoted(text)}: backslashes need single quotes")
    try:
        return _convert(field, value)
    except (KeyError, TypeError, ValueError) as error:
        allowed = "in UTF-8" if isinstance(error, UnicodeError) else describe_allowed(field)
        fault = f"{field.name} must be {allowed}, but is {quoted(value)}"
        raise ConfigError(fault) from None


def _convert(field: Field, value: object) -> object:
    """Return a value in the type of its setting; raise an error of Python if it is wrong."""
    type_, choices, limits = value_type(field), field.metadata["choices"], field.metadata["limits"]
    if value in (None, "", ()):  # only a setting that is empty by default may be empty
        if field.default in (None, "", ()):
            return field.default
    elif isinstance(field.default, tuple):
        texts = (value,) if isinstance(value, str) else tuple(value)
        if all(_is_valid_text(text, type_) for text in texts):
            return texts
    elif isinstance(value, str) and value in choices:
        return value
    elif type_ is bool:
        return {"true": True, "false": False}[str(value).lower()]
    elif type_ in (int, float) and not isinstance(value, bool):
        number = float(value)
        in_range = all(LIMITS[name](number, limit) for name, limit in limits.items())
        if in_range and math.isfinite(number) and number == type_(number):
            return type_(number)
    elif _is_valid_text(value, type_) and not choices:
        return value
    raise ValueError


def _is_valid_text(value: object, type_: type) -> bool:
    """Return whether a value is a non-empty text of a type; raise an error if it is not UTF-8."""
    if not isinstance(value, str) or value.encode() == b"" or "\0" in value:
        return False
    # a download needs its SHA-256: losses on another text are not comparable
    is_url = type_ is Source and TEXT_URL.fullmatch(value)
    return type_ is str or "://" not in value or bool(is_url)


def universal_newlines(text: str) -> str:
    r"""Replace the line ends \r\n, \r and \r\r\n with \n; the last is \r\n written as text."""
    return text.replace("\r\r\n", "\n").replace("\r\n", "\n").replace("\r", "\n")


def parse_escapes(text: str) -> str:
    r"""Replace \n, \t, \r and \\ with the characters they stand for; \r ends a line as \n does."""
    # in one pass, so that \\n becomes \n and not a newline
    replaced = re.sub(r"\\([ntr\\])", lambda match: ESCAPES[match[1]], text)
    return universal_newlines(replaced)


def format_escapes(text: str) -> str:
    r"""Write newlines, tabs, carriage returns and backslashes as `parse_escapes` reads them."""
    return re.sub(r"[\n\t\r\\]", lambda match: ESCAPE_OF[match[0]], text)


def normal_escapes(text: str) -> str:
    r"""Write newlines, tabs and carriage returns as escapes, whether or not they are ones."""
    return format_escapes(parse_escapes(text))


@contextmanager
def error_context(where: str):
    """Prefix a ConfigError with its location: a file, a line or an option."""
    try:
        yield
    except ConfigError as error:
        # prefix each line: a config file may have several faults
        raise ConfigError(*(f"{where}: {line}" for line in error.args)) from None
