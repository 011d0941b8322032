"""What a setting is: a dataclass field that knows its meaning and its range, and checks its own value."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import Field, field, fields, is_dataclass
from types import UnionType
from typing import get_args, get_origin

from configs.errors import ConfigError, printable

WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "UTF-8 text without NUL",
    tuple: "a list of texts",
}


def setting(default, meaning: str, within: str = "", choices: tuple = (), aliases: tuple = ()):
    """A dataclass field that knows its meaning, its interval (`within`, such as "[0, 1)") and its choices.

    A number with choices may be either: `int | str` with choices ("auto",). `aliases` are further names on
    the command line. A default of MISSING makes a setting that must be given.
    """
    about = {"meaning": meaning, "within": within, "choices": choices, "aliases": aliases}
    return field(default=default, metadata=about)


class Checked:
    """A dataclass whose fields are all checked, and given their exact type, as it is made."""

    def __post_init__(self):
        for each in fields(self):
            object.__setattr__(self, each.name, checked(each, getattr(self, each.name)))


def checked(this: Field, value):
    """`value` as the setting `this` wants it (6.0 is 6, a list a tuple), or ConfigError: what is allowed."""
    if is_dataclass(this.type) and isinstance(value, this.type):
        return value
    if isinstance(value, str) and value in this.metadata["choices"]:
        return value
    wanted = kind(this)
    if wanted is int and type(value) is float and value.is_integer():
        value = int(value)
    if wanted is float and type(value) is int and abs(value) < 1e300:
        value = float(value)
    if wanted is tuple and isinstance(value, list):
        value = tuple(value)
    if type(value) is not wanted or not _fits(this, value):
        raise ConfigError(f"{this.name} must be {allowed(this, value)}, but is {shown(value)}")
    return value


def _fits(this: Field, value) -> bool:
    """Whether a value of the right type is in its range; text may be empty only where that is the default."""
    if this.metadata["within"]:
        low, high = map(float, this.metadata["within"][1:-1].split(","))
        opening, closing = this.metadata["within"][0], this.metadata["within"][-1]
        return low <= value <= high and (opening, value) != ("(", low) and (closing, value) != (")", high)
    if isinstance(value, tuple):
        return value != () and all(type(text) is str and text and _is_whole(text) for text in value)
    if isinstance(value, str):
        return not this.metadata["choices"] and (value or this.default == "") and _is_whole(value)
    return True


def _is_whole(text: str) -> bool:
    """No NUL and no surrogate, which is how Python shows an argument that is not valid UTF-8."""
    return not re.search("[\0\ud800-\udfff]", text)


def kind(this: Field) -> type:
    """What a setting is beside its choices: int, float, bool, str, or tuple (of texts)."""
    origin = get_origin(this.type)
    return get_args(this.type)[0] if origin is UnionType else origin or this.type


def allowed(this: Field, value: object = "") -> str:
    """What a setting may be, in words; of several choices, those like `value` first."""
    if is_dataclass(this.type):
        return "a mapping"
    choices, within = this.metadata["choices"], this.metadata["within"]
    if choices and not within:
        return "one of " + ", ".join(sorted(choices, key=lambda choice: -_likeness(choice, value)))
    return " or ".join([WORDS[kind(this)] + (f" in {within}" if within else ""), *choices])


def _likeness(known: str, given: object) -> float:
    return difflib.SequenceMatcher(None, known, str(given)[:100]).ratio() if isinstance(given, str) else 0


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known name, or nothing where none is near."""
    nearest = difflib.get_close_matches(given[:100], list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def shown(value: object) -> str:
    """A wrong value for a message: short, on one line, text in quotes and without control characters."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "nothing"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str):
        return f"'{printable(value if len(value) <= 80 else value[:77] + '...')}'"
    return f"a {type(value).__name__}"
