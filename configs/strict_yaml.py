"""YAML without surprises: texts with their lines, which mean what the schema says and nothing else.

Built from PyYAML's events instead of its values, so that nothing is guessed (`010`, `on`, `1:30`),
nothing multiplies (aliases), nothing runs (tags) and nothing passes unseen (a key twice, a second
document).
"""

import os
import re
import stat
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from common.errors import ConfigError, printable
from configs.fields import Written, did_you_mean, place, read, settings_of, shown
from configs.schema import Config, to_dict

MAX_BYTES, MAX_DEPTH = 1_000_000, 10
MAX_EVENTS = 10_000  # a config has a few hundred, and PyYAML takes 10 microseconds or more for each


def to_yaml(config: Config) -> str:
    """The complete settings as YAML, from which `read_config` makes the same again; safe
    to print.
    """
    plain, escaped = (
        yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=unicode, width=100)
        for unicode in (True, False)
    )
    return plain if plain.replace("\n", "").isprintable() else escaped


def read_config(path: str) -> dict[str, object]:
    """The checked settings that a config file gives, by their full names: `model.n_layer`."""
    text = _read_text(path)
    with place(path):
        tree = parse(text)
        if not isinstance(tree.value, dict):
            raise ConfigError(f"config must be a mapping of keys to values; {_missing_space(text)}")
        return dict(_settings(tree))


def _settings(tree: Written, section: str = "") -> Iterator[tuple[str, object]]:
    known = settings_of(Config)
    sections = {name.split(".")[0]: name.split(".")[0] for name in known if "." in name}
    for key, node in tree.value.items():
        name = section + key
        if name in sections and isinstance(node.value, dict):
            yield from _settings(node, f"{name}.")
            continue
        with place(f"line {node.line}"):
            if name in sections:
                raise ConfigError(
                    f"{name} must be a mapping of keys to values; {_missing_space(str(node.value))}"
                )
            if name not in known or "." in key:
                names = sections | {each.name: name for name, each in known.items()}
                hint = did_you_mean(key, names, "python train.py --help lists all")
                raise ConfigError(f"unknown key {shown(key)}; {hint}")
            yield name, read(known[name], node)


def parse(text: str) -> Written:
    """The tree of a YAML text of one document, or ConfigError with the line of what is wrong."""
    events = _few_enough(_events(text))
    next(events)
    tree = None if isinstance(next(events), yaml.StreamEndEvent) else _node(next(events), events)
    if tree is None or (tree.plain and tree.value == ""):
        raise ConfigError("config is empty; give at least one setting")
    next(events)
    if not isinstance(end := next(events), yaml.StreamEndEvent):
        raise ConfigError(
            f"line {end.start_mark.line + 1}: a second document; a config is one; remove it"
        )
    return tree


def _node(event: yaml.Event, events: Iterator[yaml.Event], depth: int = 0) -> Written:
    """The node that begins with `event`; what else is in it is taken from `events`."""
    line = event.start_mark.line + 1
    if isinstance(event, yaml.AliasEvent) or event.anchor:
        raise ConfigError(
            f"line {line}: anchors and aliases are not supported; write the value out"
        )
    if event.tag:
        raise ConfigError(
            f"line {line}: tags such as {shown(event.tag)} are not supported; leave it out"
        )
    if isinstance(event, yaml.ScalarEvent):
        return Written(event.value, line, plain=event.style is None)
    if depth == MAX_DEPTH:
        raise ConfigError(f"line {line}: nested too deep; at most {MAX_DEPTH} levels")
    if isinstance(event, yaml.MappingStartEvent):
        return Written(_mapping(events, depth + 1), line)
    items = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        items.append(_node(event, events, depth + 1))
    return Written(items, line)


def _mapping(events: Iterator[yaml.Event], depth: int) -> dict[str, Written]:
    nodes = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _node(event, events, depth)
        if not isinstance(key.value, str):
            raise ConfigError(f"line {key.line}: a key must be a word, not a list or a mapping")
        if key.value in nodes:
            lines = f"lines {nodes[key.value].line} and {key.line}"
            raise ConfigError(f"duplicate key {shown(key.value)} ({lines}); keep one of them")
        nodes[key.value] = replace(_node(next(events), events, depth), line=key.line)
    return nodes


def _few_enough(events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    for count, event in enumerate(events):
        if count == MAX_EVENTS:
            line = event.start_mark.line + 1
            raise ConfigError(
                f"line {line}: too long for a config; at most {MAX_EVENTS:,} keys, values and "
                f"brackets"
            )
        yield event


def _events(text: str) -> Iterator[yaml.Event]:
    """PyYAML's events; whatever it raises (its own errors, ValueError, OverflowError and more) as
    ConfigError.
    """
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"line {line}: control character {shown(chr(error.character))}; remove it"
        ) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        if "'\\t'" in error.problem:
            raise ConfigError(f"tab at line {line}; indent with spaces") from None
        hint = _missing_space(
            text, otherwise="check the brackets, quotes and indentation before it"
        )
        raise ConfigError(f"line {line}: {printable(error.problem)}; {hint}") from None
    except Exception as error:
        raise ConfigError(f"not YAML ({type(error).__name__}); write lines of key: value") from None


def _missing_space(text: str, otherwise: str = "write key: value") -> str:
    found = re.search(r"^ *(\w+):[^\s/]", text, re.MULTILINE)
    return f"missing space after ':' in '{found[1][:80]}:'" if found else otherwise


def _read_text(path: str) -> str:
    """A config file's text: a regular file of at most 1 MB, in UTF-8, or in UTF-16 with a byte
    order mark.
    """
    with place(path):
        try:
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise ConfigError(
                    f"is a folder; give a config file, such as {', '.join(_nearby(path))}"
                )
            if not stat.S_ISREG(mode):
                raise ConfigError("is not a regular file; give a YAML file")
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            names = {Path(name).stem: name for name in _nearby(Path(path).parent, "configs")}
            hint = did_you_mean(Path(path).stem, names, f"there is {', '.join(names.values())}")
            raise ConfigError(f"no such config; {hint}") from None
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error.strerror}; mend that, or give another file"
            ) from None
        if len(data) > MAX_BYTES:
            raise ConfigError("is over 1 MB, too large for a config; give a YAML file of settings")
        try:
            return data.decode(
                "utf-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
            )
        except UnicodeDecodeError as error:
            start = error.start + len(data) - len(error.object)  # counted with the byte order mark
            raise ConfigError(
                f"invalid {error.encoding} at byte {start}; save it as UTF-8"
            ) from None


def _nearby(*folders: str | Path) -> list[str]:
    """The first few configs in the folders; the name that the README starts with where there is
    none.
    """
    found = [printable(file) for folder in folders for file in sorted(Path(folder).glob("*.yaml"))]
    return found[:9] or ["configs/shakespeare.yaml"]
