"""Settings: dataclass fields with a meaning and a range; functions that parse and check values."""

import dataclasses
import math
import operator
import re
from contextlib import contextmanager, suppress
from dataclasses import Field, fields, is_dataclass
from types import UnionType
from typing import get_args, get_origin

from common.errors import ConfigError
from common.words import quoted

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
LIMITS = {
    "at_least": operator.ge,
    "more_than": operator.gt,
    "at_most": operator.le,
    "less_than": operator.lt,
}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
ESCAPE_OF = {character: f"\\{letter}" for letter, character in ESCAPES.items()}
# NUL and surrogates: settings with these cannot be saved
INVALID_TEXT = re.compile("[\0\ud800-\udfff]")


def setting(
    default: object, meaning: str, choices: tuple = (), fixed: bool = False, **limits: float
) -> Field:
    """Declare a setting: a dataclass field with a meaning, choices and limits.

    The limits are those of LIMITS: `at_least=0, less_than=1`. A number may have choices too:
    `int | str` with choices ("auto",). A setting whose default is None is optional. A `fixed`
    setting cannot change in a run.
    """
    assert limits.keys() <= LIMITS.keys()
    metadata = {"meaning": meaning, "choices": choices, "limits": limits, "fixed": fixed}
    return dataclasses.field(default=default, metadata=metadata)


class Checked:
    """Base of dataclasses that check every setting and convert it to its type when created."""

    def __post_init__(self):
        for field in fields(self):
            if field.metadata:
                # a frozen dataclass refuses an assignment, even in here
                object.__setattr__(self, field.name, check_value(field, getattr(self, field.name)))


def settings_of(section: type) -> dict[str, Field]:
    """Return the settings of a dataclass and its sections by full name: `seed`, `model.n_layer`."""
    settings = {field.name: field for field in fields(section) if field.metadata}
    for inner in fields(section):
        if is_dataclass(inner.type):
            inner_settings = settings_of(inner.type)
            settings |= {f"{inner.name}.{name}": field for name, field in inner_settings.items()}
    return settings


def value_type(field: Field) -> type:
    """Return a setting's type without its choices: int, float, bool, str or tuple."""
    origin = get_origin(field.type)
    if origin is UnionType:  # `float | str`: a float, or a choice such as auto
        return get_args(field.type)[0]
    if origin is tuple:  # `tuple[str, ...]`
        return tuple
    return field.type


def describe_allowed(field: Field) -> str:
    """Describe the values that a setting may have."""
    choices = field.metadata["choices"]
    if value_type(field) is tuple:
        return "one string or several"
    if value_type(field) is str and choices:
        return f"one of {', '.join(choices)}"

    # a number, after its choices: `auto or a number of at least 0`
    limits = describe_limits(field)
    return " or ".join([*choices, TYPE_NAMES[value_type(field)] + (limits and f" of {limits}")])


def describe_limits(field: Field) -> str:
    """Describe the limits of a number: `at least 0 and less than 1`."""
    limits = field.metadata["limits"].items()
    return " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits)


def parse_value(field: Field, text: str | list[str]) -> object:
    """Parse a value by the type of its setting, without guessing: `on` is not true.

    Raises ConfigError with the allowed values.
    """
    # text that does not parse stays a string, which `check_value` refuses unless it is a choice
    value, type_ = text, value_type(field)
    if type_ is tuple and isinstance(text, str):
        value = [text]
    elif type_ is bool and isinstance(text, str):
        value = {"true": True, "false": False}.get(text.lower(), text)
    elif type_ in (int, float) and isinstance(text, str):
        with suppress(ValueError):
            value = float(text)
    return check_value(field, value)


def check_value(field: Field, value: object) -> object:
    """Convert a value to the setting's exact type: 6.0 to 6, a list to a tuple.

    Raises ConfigError with the allowed values if the type is wrong or the value out of range.
    """
    if value is None and field.default is None:
        return value

    # JSON and YAML have no tuples, and 1e3 may stand for an integer
    if isinstance(value, list):
        value = tuple(value)
    type_ = value_type(field)
    if type_ is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type_ is float and type(value) is int:
        value = float(value)

    if not _is_allowed(field, value):
        # a file name that is not UTF-8 has lone surrogates
        if isinstance(value, (str, tuple)) and re.search(
            "[\ud800-\udfff]", "".join(map(str, value))
        ):
            raise ConfigError(
                f"{field.name}: {quoted(value)} is not UTF-8; rename the file or folder"
            )
        raise ConfigError(f"{field.name} must be {describe_allowed(field)}, but is {quoted(value)}")
    return value


def _is_allowed(field: Field, value: object) -> bool:
    """Return whether a value has the right type and is in range.

    Only a string or list that is empty by default may be empty.
    """
    choices, limits = field.metadata["choices"], field.metadata["limits"]
    # a choice such as auto, which a number may have too
    if isinstance(value, str) and value in choices:
        return True
    # not isinstance, for which True is an int
    if type(value) is not value_type(field):
        return False

    if value in ("", ()):
        return value == field.default
    if isinstance(value, (int, float)):
        in_range = all(LIMITS[name](value, limit) for name, limit in limits.items())
        return math.isfinite(value) and in_range

    items = value if isinstance(value, tuple) else (value,)
    valid = all(isinstance(item, str) and item and not INVALID_TEXT.search(item) for item in items)
    return valid and not choices


def universal_newlines(text: str) -> str:
    r"""Replace the line ends \r\n and \r with \n, as Python's text mode does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def unescape(text: str) -> str:
    r"""Replace \n, \t, \r and \\ with the characters they stand for; \r ends a line as \n does."""
    # in one pass, so that \\n becomes \n and not a newline
    replaced = re.sub(r"\\([ntr\\])", lambda match: ESCAPES[match[1]], text)
    return universal_newlines(replaced)


def with_escapes(text: str) -> str:
    r"""Write newlines, tabs, carriage returns and backslashes as `unescape` reads them."""
    return re.sub(r"[\n\t\r\\]", lambda match: ESCAPE_OF[match[0]], text)


@contextmanager
def error_context(where: str):
    """Prefix a ConfigError with its location: a file, a line or an option."""
    try:
        yield
    except ConfigError as error:
        # prefix each line: a config file may have several faults
        raise ConfigError(*(f"{where}: {line}" for line in error.args)) from None
