"""Options of the command line, derived from the dataclasses of the settings.

Every setting is an option: `--model.n_layer=6` or `--model.n_layer 6`, and `--n_layer=6` if no
other section has that key. A dash equals an underscore; abbreviations are not accepted.

argparse would not do: `--resume[=PATH]` must not consume the next argument, and an error must be
one line that names the nearest option.
"""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass

from common.errors import ConfigError
from configs.fields import (
    RawValue,
    brief,
    describe_allowed,
    error_context,
    is_valid_text,
    parse_value,
    settings_of,
    value_type,
)
from configs.schema import suggest_setting

NOTES = """
A key needs its section only if another section has the same key. --key value is the same as
--key=value, and a dash is the same as an underscore. A setting that is true or false needs no
value: --key is --key=true. An option may be given only once, except one that takes a list: its
values are collected.
[0, 1) means at least 0 and below 1.
"""


def parse_arguments(argv: Sequence[str], *sections: type) -> tuple[list[str], dict[str, object]]:
    """Return the arguments that are not options, and the values of the options by full name."""
    options = options_of(*sections)
    words, values, given = [], {}, {}  # `given` has the option as typed
    for word in argv:
        if not is_valid_text(word):
            raise ConfigError(f"argument {brief(word)} is not UTF-8 text; write it in UTF-8")
    rest = iter(argv)
    for word in rest:
        if not word.startswith("-"):
            words.append(word)
            continue
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if key not in options:
            known = {name: f"--{name}" for name in (*options, "help")}
            hint = suggest_setting(key, known, "--help lists all")
            raise ConfigError(f"unknown option {brief(option)}; {hint}")
        name, field, bare_value = options[key]
        if name in given and value_type(field) is not tuple:
            both = f"{brief(given[name])} and {brief(word)}"
            raise ConfigError(f"duplicate option {brief(name)} ({both}); keep one of them")
        with error_context(option):
            if not equals:
                text = bare_value or next(rest, "--")
                if text.startswith("--"):
                    raise ConfigError(
                        f"has no value; it must be {describe_allowed(field)}; write {option}=VALUE"
                    )
            elif key.startswith("no_"):
                raise ConfigError("takes no value")
            value = _parse_option(field, text)
        values[name] = values.get(name, ()) + value if value_type(field) is tuple else value
        given.setdefault(name, word if bare_value else f"{option}={text}")
    return words, values


def _parse_option(field: Field, text: str) -> object:
    """Parse the value of an option; a list may be written as in YAML, `[a, b]`."""
    if field.metadata["repeatable"] and text:
        return (text,)
    if value_type(field) is tuple and text.startswith("["):
        from configs.strict_yaml import parse  # only here: PyYAML may be missing

        return parse_value(field, parse(text))
    return parse_value(field, RawValue(text, plain=value_type(field) is not str))


def options_of(*sections: type) -> dict[str, tuple[str, Field, str]]:
    """Return, for every name of an option: full name, setting, and value if none is given."""
    settings = {name: field for section in sections for name, field in settings_of(section).items()}
    keys = Counter(field.name for field in settings.values())
    options = {}
    for name, field in settings.items():
        short = [field.name] if keys[field.name] == 1 else []
        for alias in (name, *short, *field.metadata["aliases"]):
            bare_value = field.metadata["bare_value"]
            if alias.startswith("no_"):
                bare_value = "false"
            elif value_type(field) is bool:
                bare_value = "true"
            options[alias.replace("-", "_")] = (name, field, bare_value)
    return options


def command_help(usage: str, *sections: type) -> str:
    """Return what a command with the settings of these sections prints for --help."""
    return usage + "".join(map(_help, sections)) + NOTES


def _help(section: type, prefix: str = "") -> str:
    """Describe the settings of a section, then the sections in it."""
    lines = ["", section.__doc__.splitlines()[0]]
    for field in fields(section):
        if field.metadata:
            also = "".join(f"; also --{alias}" for alias in field.metadata["aliases"])
            meaning = f"{field.metadata['meaning']}; {describe_allowed(field)}{also}"
            option = f"  --{prefix}{field.name}{_default(field.default)} "
            indent = " " * 40
            lines.append(
                textwrap.fill(
                    meaning, 100, initial_indent=f"{option:<40}", subsequent_indent=indent
                )
            )
    inner = [
        _help(field.type, f"{field.name}.") for field in fields(section) if is_dataclass(field.type)
    ]
    return "\n".join(lines) + "\n" + "".join(inner)


def _default(value: object) -> str:
    if value is None or value is MISSING:
        return ""
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return "=" + (text.lower() if isinstance(value, bool) else text)
