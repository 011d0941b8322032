"""Settings: dataclass fields with a meaning and a range, and the function that checks a value."""

import dataclasses
import math
import re
from contextlib import contextmanager
from dataclasses import Field, fields
from operator import ge, gt, le, lt
from typing import get_args

from common.console import ConfigError
from common.messages import quoted

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
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
    """Return the type of a value that is not a choice: int, float, bool or str (also in a list)."""
    return (get_args(field.type) or [field.type])[0]


def describe_allowed(field: Field) -> str:
    """Describe the values that a setting may have: `auto or a number of at least 0`."""
    choices, limits, type_ = field.metadata["choices"], field.metadata["limits"], value_type(field)
    if isinstance(field.default, tuple):
        return "one string or several"
    if type_ is str and choices:
        return f"one of {', '.join(choices)}"
    words = " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())
    return " or ".join([*choices, TYPE_NAMES[type_] + (words and f" of {words}")])


def parse_value(field: Field, value: object) -> object:
    """Return a value, or its text, in the type of its setting: "6.0" as 6, a list as a tuple.

    Nothing is guessed: `on` is not true. Raises ConfigError with the allowed values.
    """
    if isinstance(value, list):  # JSON and YAML have no tuples
        value = tuple(value)
    try:
        return _convert(field, value)
    except (KeyError, TypeError, ValueError):
        fault = f"{field.name} must be {describe_allowed(field)}, but is {quoted(value)}"
        raise ConfigError(fault) from None


def _convert(field: Field, value: object) -> object:
    """Return a value in the type of its setting; raise an error of Python if it is wrong."""
    type_, choices, limits = value_type(field), field.metadata["choices"], field.metadata["limits"]
    if value in (None, "", ()):  # only a setting that is empty by default may be empty
        if value == field.default:
            return value
    elif isinstance(field.default, tuple):
        texts = (value,) if isinstance(value, str) else tuple(value)
        if all(map(_is_text, texts)):
            return texts
    elif isinstance(value, str) and value in choices:
        return value
    elif type_ is str:
        if _is_text(value) and not choices:
            return value
    elif type_ is bool:
        return {"true": True, "false": False}[str(value).lower()]
    elif not isinstance(value, bool):
        number = float(value)
        in_range = all(LIMITS[name](number, limit) for name, limit in limits.items())
        if in_range and math.isfinite(number) and number == type_(number):
            return type_(number)
    raise ValueError


def _is_text(value: object) -> bool:
    """Return whether a value is a non-empty text without NUL; raise an error if it is not UTF-8."""
    return isinstance(value, str) and value.encode() != b"" and "\0" not in value


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


@contextmanager
def error_context(where: str):
    """Prefix a ConfigError with its location: a file, a line or an option."""
    try:
        yield
    except ConfigError as error:
        # prefix each line: a config file may have several faults
        raise ConfigError(*(f"{where}: {line}" for line in error.args)) from None
