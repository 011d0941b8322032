"""Settings: dataclass fields with a meaning and a range; functions that parse and check values."""

import dataclasses
import math
import re
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import UnionType
from typing import get_args, get_origin

from common.errors import ConfigError

TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
}
LIST_NAMES = {str: "strings", float: "numbers"}
CONTAINERS = {list: "a list", dict: "a mapping"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
WRITTEN = {character: f"\\{letter}" for letter, character in ESCAPES.items()}
NO_VALUE = ("", "~", "null", "Null", "NULL")
NUMBER = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
NOT_NUMBERS = {  # pattern -> what is wrong with a string that matches it
    r".{41,}": "has more than 40 characters",
    r"none": "is not a value",
    r"[-+]?0[0-9_].*": "has a leading zero",
    r"[-+]?[0-9]+(:[0-9]+)+": "is a time of day",
    r"[-+]?\.?(nan|inf|infinity)": "is not finite",
    rf"(?!{NUMBER}\Z).*": "is not a plain number, such as 2000, 0.5 or 1e-3",
}


def setting(
    default: object,
    meaning: str,
    within: str = "",
    choices: tuple = (),
    aliases: tuple = (),
    bare_value: str = "",
    repeatable: bool = False,
) -> Field:
    """Declare a setting: a dataclass field with a meaning, an interval and choices.

    `within` is an interval such as "[0, 1)". A number may have choices too: `int | str` with
    choices ("auto",). In a list, each item must be allowed. A setting whose default is MISSING is
    required; with None it may be omitted. On the command line the setting also has its `aliases`
    (those that start with `no_` mean false), and `bare_value` is its value when the option is given
    without one. A `repeatable` list is given one string at a time, unchanged; other lists may be
    written as in YAML.
    """
    metadata = {
        "meaning": meaning,
        "within": within,
        "choices": choices,
        "aliases": aliases,
        "bare_value": bare_value,
        "repeatable": repeatable,
    }
    return dataclasses.field(default=default, metadata=metadata)


class Checked:
    """Base of dataclasses that check every setting and convert it to its type when created."""

    def __post_init__(self):
        for field in fields(self):
            if field.metadata:
                object.__setattr__(self, field.name, check_value(field, getattr(self, field.name)))


def settings_of(section: type) -> dict[str, Field]:
    """Return the settings of a dataclass and its sections by full name: `seed`, `model.n_layer`."""
    found = {field.name: field for field in fields(section) if field.metadata}
    for inner in fields(section):
        if is_dataclass(inner.type):
            settings = settings_of(inner.type)
            found |= {f"{inner.name}.{name}": field for name, field in settings.items()}
    return found


def value_type(field: Field) -> type:
    """Return a setting's type without its choices: int, float, bool, str or tuple."""
    origin = get_origin(field.type)
    return get_args(field.type)[0] if origin is UnionType else origin or field.type


def item_type(field: Field) -> type:
    """Return the type of the items of a list, otherwise the type of the setting."""
    return get_args(field.type)[0] if value_type(field) is tuple else value_type(field)


def describe_allowed(field: Field) -> str:
    """Describe the values that a setting may have."""
    choices, within = field.metadata["choices"], field.metadata["within"]
    interval = f" in {within}" if within else ""
    if value_type(field) is tuple:
        items = f"any of {', '.join(choices)}" if choices else LIST_NAMES[item_type(field)]
        return f"a list of {items}{interval}"
    if not choices or within:
        return " or ".join([*choices, TYPE_NAMES[value_type(field)] + interval])
    return "one of " + ", ".join(choices)


def check_value(field: Field, value: object) -> object:
    """Convert a value to the setting's exact type: 6.0 to 6, a list to a tuple.

    Raises ConfigError with the allowed values if the type is wrong or the value out of range.
    """
    if value is field.default is None:
        return value
    if value_type(field) is not tuple:
        value = _convert(value, value_type(field))
        valid = _is_allowed(field, value)
    elif isinstance(value, (list, tuple)):
        value = tuple(_convert(item, item_type(field)) for item in value)
        may_be_empty = field.default == ()
        valid = all(_is_allowed(field, item) for item in value) and (may_be_empty or len(value) > 0)
    else:
        valid = False
    if not valid:
        raise ConfigError(f"{field.name} must be {describe_allowed(field)}, but is {brief(value)}")
    return value


def _convert(value: object, wanted: type) -> object:
    """Convert a number to the wanted type if that does not change it."""
    if wanted is int and type(value) is float and value.is_integer():
        return int(value)
    if wanted is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    return value


def _is_allowed(field: Field, value: object) -> bool:
    """Return whether a value, or an item of a list, has the right type and is in range.

    A string may be empty only if that is the default.
    """
    choices, interval = field.metadata["choices"], field.metadata["within"]
    if isinstance(value, str) and value in choices:
        return True
    if type(value) is not item_type(field):
        return False
    if isinstance(value, str):
        return not choices and is_valid_text(value) and (value != "" or field.default == "")
    if not interval:
        return True
    low, high = map(float, interval[1:-1].split(","))
    above = value > low or (value == low and interval[0] == "[")
    below = value < high or (value == high and interval[-1] == "]")
    return above and below


def is_valid_text(text: str) -> bool:
    """Return whether a string has no NUL, and no surrogate (in place of an invalid UTF-8 byte)."""
    return not re.search("[\0\ud800-\udfff]", text)


@dataclass(frozen=True)
class RawValue:
    """A value as written: a string (`plain` if unquoted), or a list or mapping of RawValue."""

    value: str | list | dict
    line: int = 1
    plain: bool = False


def parse_value(field: Field, raw: RawValue) -> object:
    """Parse a value by the type of its setting, without guessing: `010` is not a number.

    Raises ConfigError with the allowed values.
    """
    text, wanted = raw.value, value_type(field)
    if isinstance(text, list):
        return check_value(field, [item.value for item in text])
    if raw.plain and text in NO_VALUE:
        remedy = "" if field.default is MISSING else ", or be left out"
        raise ConfigError(
            f"{field.name} has no value; it must be {describe_allowed(field)}{remedy}"
        )
    if wanted is tuple and isinstance(text, str):
        return check_value(field, [text])
    if wanted is str or isinstance(text, dict) or text in field.metadata["choices"]:
        return check_value(field, text)
    if not raw.plain:
        raise ConfigError(
            f"{field.name} must be {describe_allowed(field)}, but is a string: {brief(text)}; "
            "remove the quotes"
        )
    if wanted is bool:
        return check_value(field, {"true": True, "false": False}.get(text, text))
    for pattern, reason in NOT_NUMBERS.items():
        if re.fullmatch(pattern, text, re.IGNORECASE | re.DOTALL):
            raise ConfigError(
                f"{field.name} must be {describe_allowed(field)}, but {brief(text)} {reason}"
            )
    is_integer = re.fullmatch("[-+]?[0-9]+", text)
    return check_value(field, int(text) if is_integer else float(text))


def brief(value: object) -> str:
    """Return a short form of a value for a message, with strings quoted."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return str(value) if math.isfinite(value) else f"{value}, which is not finite"
    if isinstance(value, str):
        return f"'{value if len(value) <= 80 else value[:77] + '...'}'"
    if isinstance(value, tuple):
        return f"[{', '.join(map(brief, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    return CONTAINERS.get(type(value), f"a {type(value).__name__}")


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


@contextmanager
def error_context(where: str):
    """Prefix a ConfigError with its location: a file, a line or an option."""
    try:
        yield
    except ConfigError as error:
        short = where if len(where) <= 300 else f"{where[:140]}...{where[-140:]}"
        raise ConfigError(*(f"{short}: {line}" for line in error.args)) from None
