"""Settings: dataclass fields with a meaning and a range, which parse and check their values."""

import dataclasses
import math
import re
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import UnionType
from typing import get_args, get_origin

from common.errors import ConfigError, escape

TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of texts",
}
CONTAINERS = {list: "a list", dict: "a mapping"}
NO_VALUE = ("", "~", "null", "Null", "NULL")
NUMBER = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
NOT_NUMBERS = {  # pattern -> what is wrong with a text that matches it
    r".{41,}": "has more than 40 characters",
    r"none": "is no value",
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

    `within` is such as "[0, 1)". A number with choices may be either: `int | str` with choices
    ("auto",). A setting whose default is MISSING is required; with None it may be omitted. On the
    command line the setting also has its `aliases` (those that start with `no-` mean false), and
    `bare_value` is its value when the option is given without one. A `repeatable` list is given one
    text at a time, unchanged; other lists may be written as in YAML.
    """
    about = {
        "meaning": meaning,
        "within": within,
        "choices": choices,
        "aliases": aliases,
        "bare_value": bare_value,
        "repeatable": repeatable,
    }
    return dataclasses.field(default=default, metadata=about)


class Checked:
    """A dataclass that checks every setting, and converts it to its exact type, when created."""

    def __post_init__(self):
        for field in fields(self):
            if field.metadata:
                object.__setattr__(self, field.name, checked(field, getattr(self, field.name)))


def settings_of(section: type) -> dict[str, Field]:
    """Return the settings of a dataclass and its sections by full name: `seed`, `model.n_layer`."""
    found = {field.name: field for field in fields(section) if field.metadata}
    for inner in fields(section):
        if is_dataclass(inner.type):
            settings = settings_of(inner.type)
            found |= {f"{inner.name}.{name}": field for name, field in settings.items()}
    return found


def kind(field: Field) -> type:
    """Return a setting's type apart from choices: int, float, bool, str or tuple (of texts)."""
    origin = get_origin(field.type)
    return get_args(field.type)[0] if origin is UnionType else origin or field.type


def allowed(field: Field) -> str:
    """Describe the values that a setting may have."""
    choices, within = field.metadata["choices"], field.metadata["within"]
    if not choices or within:
        interval = f" in {within}" if within else ""
        return " or ".join([*choices, TYPE_NAMES[kind(field)] + interval])
    return "one of " + ", ".join(choices)


def checked(field: Field, value: object) -> object:
    """Return a value in the setting's exact type: 6.0 as 6, a list as a tuple.

    Raises ConfigError, with what is allowed, for any other type and outside of the range.
    """
    if value is field.default is None:
        return value
    if isinstance(value, str) and value in field.metadata["choices"]:
        return value
    wanted = kind(field)
    if wanted is int and type(value) is float and value.is_integer():
        value = int(value)
    if wanted is float and type(value) is int and abs(value) < 1e300:
        value = float(value)
    if wanted is tuple and isinstance(value, list):
        value = tuple(value)
    if type(value) is not wanted or not _in_range(field, value):
        raise ConfigError(f"{field.name} must be {allowed(field)}, but is {brief(value)}")
    return value


def _in_range(field: Field, value: object) -> bool:
    """Return whether a value of the right type is allowed.

    Texts and lists may be empty only where that is the default.
    """
    if isinstance(value, tuple):
        texts = all(type(text) is str and text and is_valid_text(text) for text in value)
        return texts and (value or field.default == ())
    if isinstance(value, str):
        free = not field.metadata["choices"]
        return free and is_valid_text(value) and (value or field.default == "")
    interval = field.metadata["within"]
    if not interval:
        return True
    low, high = map(float, interval[1:-1].split(","))
    above = value > low or (value == low and interval[0] == "[")
    below = value < high or (value == high and interval[-1] == "]")
    return above and below


def is_valid_text(text: str) -> bool:
    """Return whether a text has no NUL and no surrogate, which stands for an invalid UTF-8 byte."""
    return not re.search("[\0\ud800-\udfff]", text)


@dataclass(frozen=True)
class RawValue:
    """A value as written: text (`plain` if without quotes), or a list or mapping of these."""

    value: str | list | dict
    line: int = 1
    plain: bool = False


def parse_value(field: Field, raw: RawValue) -> object:
    """Parse a value by the type of its setting, never by a guess: 010 and on are no numbers.

    Raises ConfigError, with what is allowed.
    """
    text, wanted = raw.value, kind(field)
    if isinstance(text, list):
        return checked(field, [each.value for each in text])
    if raw.plain and text in NO_VALUE:
        remedy = "" if field.default is MISSING else ", or be left out"
        raise ConfigError(f"{field.name} has no value; it must be {allowed(field)}{remedy}")
    if wanted is tuple and isinstance(text, str):
        return checked(field, [text])
    if wanted is str or isinstance(text, dict) or text in field.metadata["choices"]:
        return checked(field, text)
    if not raw.plain:
        raise ConfigError(
            f"{field.name} must be {allowed(field)}, but is text: {brief(text)}; remove the quotes"
        )
    if wanted is bool:
        return checked(field, {"true": True, "false": False}.get(text, text))
    for pattern, reason in NOT_NUMBERS.items():
        if re.fullmatch(pattern, text, re.IGNORECASE | re.DOTALL):
            raise ConfigError(f"{field.name} must be {allowed(field)}, but {brief(text)} {reason}")
    is_integer = re.fullmatch("[-+]?[0-9]+", text)
    return checked(field, int(text) if is_integer else float(text))


def brief(value: object) -> str:
    """Return a value for a message: short, on one line, texts quoted and escaped."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return str(value) if math.isfinite(value) else f"{value}, which is not finite"
    if isinstance(value, str):
        return f"'{escape(value if len(value) <= 80 else value[:77] + '...')}'"
    if isinstance(value, tuple):
        return f"[{', '.join(map(brief, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    return CONTAINERS.get(type(value), f"a {type(value).__name__}")


@contextmanager
def error_context(where: str):
    """Prefix a ConfigError with its place: a file, a line, an option."""
    try:
        yield
    except ConfigError as error:
        short = where if len(where) <= 300 else f"{where[:140]}...{where[-140:]}"
        raise ConfigError(f"{escape(short)}: {error}") from None
