"""What a setting is: a dataclass field that knows its meaning and range, reads and checks its own
value.
"""

import difflib
import math
import re
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import get_args, get_origin

from common.errors import ConfigError, printable

WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of texts",
}
KINDS = {list: "a list", dict: "a mapping"}
NO_VALUE = ("", "~", "null", "Null", "NULL")
NUMBER = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
NO_NUMBERS = {
    r".{41,}": "has more than 40 characters",
    r"none": "is no value",
    r"[-+]?0[0-9_].*": "has a leading zero",
    r"[-+]?[0-9]+(:[0-9]+)+": "is a time of day",
    r"[-+]?\.?(nan|inf|infinity)": "is not finite",
    rf"(?!{NUMBER}\Z).*": "is not a plain number, such as 2000, 0.5 or 1e-3",
}


def setting(
    default,
    meaning: str,
    within: str = "",
    choices: tuple = (),
    aliases: tuple = (),
    alone: str = "",
):
    """A dataclass field with a `meaning`, an interval (`within`, such as "[0, 1)") and `choices`.

    A number with choices may be either: `int | str` with choices ("auto",). A default of MISSING
    must be given, one of None may be left unsaid. On the command line the setting has its `aliases`
    too (those that begin with `no-` mean false), and is worth `alone` when it is given without a
    value.
    """
    about = {
        "meaning": meaning,
        "within": within,
        "choices": choices,
        "aliases": aliases,
        "alone": alone,
    }
    return field(default=default, metadata=about)


class Checked:
    """A dataclass whose settings are all checked, and given their exact type, as it is made."""

    def __post_init__(self):
        for each in fields(self):
            if each.metadata:
                object.__setattr__(self, each.name, checked(each, getattr(self, each.name)))


def settings_of(section: type) -> dict[str, Field]:
    """Every setting of a dataclass and of the sections in it, by its full name: `seed`,
    `model.n_layer`.
    """
    found = {each.name: each for each in fields(section) if each.metadata}
    for inner in fields(section):
        if is_dataclass(inner.type):
            found |= {
                f"{inner.name}.{name}": each for name, each in settings_of(inner.type).items()
            }
    return found


def kind(this: Field) -> type:
    """What a setting is beside its choices: int, float, bool, str, or tuple (of texts)."""
    origin = get_origin(this.type)
    return get_args(this.type)[0] if origin is UnionType else origin or this.type


def allowed(this: Field, value: object = None) -> str:
    """What a setting may be, in words; of several choices, those like `value` first."""
    choices, within = this.metadata["choices"], this.metadata["within"]
    if not choices or within:
        return " or ".join([*choices, WORDS[kind(this)] + (f" in {within}" if within else "")])
    likeness = {
        choice: difflib.SequenceMatcher(None, choice, shown(value)).ratio() for choice in choices
    }
    return "one of " + ", ".join(
        sorted(choices, key=likeness.get, reverse=True) if value else choices
    )


def checked(this: Field, value):
    """`value` as the setting wants it (6.0 is 6, a list a tuple), or ConfigError with what is
    allowed.
    """
    if (
        isinstance(value, str) and value in this.metadata["choices"]
    ) or value is this.default is None:
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
    """Whether a value of the right type is in its range; a text or list may be empty only where
    that is the default.
    """
    if isinstance(value, tuple):
        return (value or this.default == ()) and all(
            type(text) is str and text and is_whole(text) for text in value
        )
    if isinstance(value, str):
        return not this.metadata["choices"] and (value or this.default == "") and is_whole(value)
    if not this.metadata["within"]:
        return True
    interval = this.metadata["within"]
    low, high = map(float, interval[1:-1].split(","))
    return (
        low <= value <= high
        and (interval[0], value) != ("(", low)
        and (interval[-1], value) != (")", high)
    )


def is_whole(text: str) -> bool:
    """No NUL and no surrogate, which is how Python shows an argument that is not valid UTF-8."""
    return not re.search("[\0\ud800-\udfff]", text)


@dataclass(frozen=True)
class Written:
    """What somebody wrote for a setting: a text (`plain` if without quotes), or a list or dict of
    more such.
    """

    value: str | list | dict
    line: int = 1
    plain: bool = False


def read(this: Field, written: Written):
    """The checked value that was written: by the setting's type and never by a guess, so 010 and on
    are no numbers.
    """
    text, wanted = written.value, kind(this)
    if isinstance(text, list):
        return checked(this, [each.value for each in text])
    if written.plain and text in NO_VALUE:
        raise ConfigError(f"{this.name} has no value; it must be {allowed(this)}, or be left out")
    if wanted is tuple and isinstance(text, str):
        return checked(this, [text])
    if wanted is str or isinstance(text, dict) or text in this.metadata["choices"]:
        return checked(this, text)
    if not written.plain:
        raise ConfigError(
            f"{this.name} must be {allowed(this)}, but is text: {shown(text)}; remove the quotes"
        )
    if wanted is bool:
        return checked(this, {"true": True, "false": False}.get(text, text))
    for pattern, reason in NO_NUMBERS.items():
        if re.fullmatch(pattern, text, re.IGNORECASE | re.DOTALL):
            raise ConfigError(f"{this.name} must be {allowed(this)}, but {shown(text)} {reason}")
    return checked(this, int(text) if re.fullmatch("[-+]?[0-9]+", text) else float(text))


def shown(value: object) -> str:
    """A value for a message: short, on one line, text in quotes and without control characters."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return str(value) if math.isfinite(value) else f"{value}, which is not finite"
    if isinstance(value, str):
        return f"'{printable(value if len(value) <= 80 else value[:77] + '...')}'"
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    return KINDS.get(type(value), f"a {type(value).__name__}")


def did_you_mean(given: str, known: dict[str, str], otherwise: str) -> str:
    """`did you mean X?`, where X stands for the nearest known name, or `otherwise` where none is
    near.
    """
    key = given.rpartition(".")[2]  # of another section than was thought
    near = [key] if key in known else difflib.get_close_matches(given[:99], known, n=1)
    near = near or [name for name in known if given and name.startswith(given)]
    return f"did you mean {known[near[0]]}?" if near else otherwise


@contextmanager
def place(where: str):
    """Say in front of a ConfigError where it is: a file, a line, an option."""
    try:
        yield
    except ConfigError as error:
        short = where if len(where) <= 300 else f"{where[:140]}...{where[-140:]}"
        raise ConfigError(f"{printable(short)}: {error}") from None
