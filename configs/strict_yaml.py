"""Config files: a subset of YAML in which values mean what the schema says, and nothing else.

Values are parsed by the type of their setting, so nothing is guessed (`010`, `on`, `1:30`).
Aliases, tags, duplicate keys and second documents are errors.
"""

import glob
import os
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from common.errors import ConfigError, did_you_mean
from common.files import beside_code, read_regular
from configs.fields import RawValue, brief, error_context, parse_value, settings_of
from configs.schema import Config, suggest_setting, to_dict

SETTINGS = settings_of(Config)  # by full name
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}
MAX_FAULTS = 5  # wrong settings that are reported at once
MAX_BYTES = 1_000_000
MAX_DEPTH = 10
MAX_EVENTS = 10_000  # a config has a few hundred; PyYAML takes 10 microseconds or more for each


def to_yaml(config: Config) -> str:
    """Return the complete settings as YAML that `read_config` reads back; safe to print."""
    options = {"sort_keys": False, "width": 100}
    plain = yaml.safe_dump(to_dict(config), allow_unicode=True, **options)
    if plain.replace("\n", "").isprintable():
        return plain
    return yaml.safe_dump(to_dict(config), allow_unicode=False, **options)


def read_config(path: str) -> dict[str, object]:
    """Return the checked settings in a config file by full name: `model.n_layer`.

    Raises ConfigError with a line for each of the first MAX_FAULTS wrong settings.
    """
    with error_context(path):
        text = _read_text(path)
        tree = parse(text)
        if not isinstance(tree.value, dict):
            raise ConfigError(f"config must be a mapping of keys to values; {_missing_space(text)}")
        settings, faults = {}, []
        for section, key, raw in _entries(tree):
            try:
                with error_context(f"line {raw.line}"):
                    settings[section + key] = _parse_setting(section, key, raw)
            except ConfigError as error:
                faults.append(str(error))
        if faults:
            raise ConfigError(*faults[:MAX_FAULTS])
        return settings


def _entries(tree: RawValue, section: str = "") -> Iterator[tuple[str, str, RawValue]]:
    """Yield the section, such as `model.`, the key and the value of each entry in a mapping."""
    for key, raw in tree.value.items():
        if section + key in SECTIONS and isinstance(raw.value, dict):
            yield from _entries(raw, f"{key}.")
        else:
            yield section, key, raw


def _parse_setting(section: str, key: str, raw: RawValue) -> object:
    """Parse an entry; raise ConfigError if there is no such setting, or its value is wrong."""
    name = section + key
    if name in SECTIONS:
        hint = _missing_space(str(raw.value))
        raise ConfigError(f"{name} must be a mapping of keys to values; {hint}")
    if name not in SETTINGS or "." in key:
        sections = {name: name for name in SECTIONS}
        names = sections | {field.name: name for name, field in SETTINGS.items()}
        hint = suggest_setting(key, names, "python train.py --help lists all")
        raise ConfigError(f"unknown key {brief(key)}; {hint}")
    return parse_value(SETTINGS[name], raw)


def parse(text: str) -> RawValue:
    """Parse a YAML text of one document; raise ConfigError with the line of what is wrong."""
    with _yaml_errors(text):
        _refuse_unsupported(text)
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is None or (
            isinstance(tree, yaml.ScalarNode) and not tree.value and not tree.style
        ):
            raise ConfigError("config is empty; give at least one setting")
        return _raw_value(tree)


def _refuse_unsupported(text: str) -> None:
    """Raise ConfigError for a text that is too long or deep, has aliases, tags or two documents."""
    depth = documents = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        line = event.start_mark.line + 1
        if count == MAX_EVENTS:
            raise ConfigError(
                f"line {line}: too long for a config; "
                f"at most {MAX_EVENTS:,} keys, values and brackets"
            )
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise ConfigError(
                f"line {line}: a second document; a config must be a single one; remove it"
            )
        if getattr(event, "anchor", None):  # aliases have one, too
            raise ConfigError(
                f"line {line}: anchors and aliases are not supported; write the value out"
            )
        if getattr(event, "tag", None):
            tag = brief(event.tag)
            raise ConfigError(f"line {line}: tags such as {tag} are not supported; leave it out")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"line {line}: nested too deep; at most {MAX_DEPTH} levels")


def _raw_value(node: yaml.Node) -> RawValue:
    """Convert a node of PyYAML; scalars stay strings, whatever PyYAML would convert them to."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        return RawValue(node.value, line, plain=node.style is None)
    if isinstance(node, yaml.SequenceNode):
        return RawValue([_raw_value(item) for item in node.value], line)
    entries = {}
    for key_node, value_node in node.value:
        key = _raw_value(key_node)
        if not isinstance(key.value, str):
            raise ConfigError(f"line {key.line}: a key must be a word, not a list or a mapping")
        if key.value in entries:
            lines = f"lines {entries[key.value].line} and {key.line}"
            raise ConfigError(f"duplicate key {brief(key.value)} ({lines}); keep one of them")
        entries[key.value] = replace(_raw_value(value_node), line=key.line)
    return RawValue(entries, line)


@contextmanager
def _yaml_errors(text: str) -> Iterator[None]:
    """Turn all exceptions from PyYAML (its own, ValueError and others) into ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = brief(chr(error.character))
        raise ConfigError(f"line {line}: control character {character}; remove it") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        unspaced = _missing_space(text, otherwise="")
        if "expected ':'" in error.problem and error.context_mark and not unspaced:
            line = error.context_mark.line + 1
            raise ConfigError(f"line {line}: missing ':' after the key; write key: value") from None
        if "'\\t'" in error.problem:
            raise ConfigError(f"tab at line {line}; indent with spaces") from None
        hint = _missing_space(
            text, otherwise="check the brackets, quotes and indentation before it"
        )
        raise ConfigError(f"line {line}: {error.problem}; {hint}") from None
    except Exception as error:
        raise ConfigError(f"not YAML ({type(error).__name__}); write lines of key: value") from None


def _missing_space(text: str, otherwise: str = "write key: value") -> str:
    """Return a hint if a colon lacks its space (`lr:0.1`)."""
    found = re.search(r"^ *(\w+):[^\s/]", text, re.MULTILINE)
    return f"missing space after ':' in '{found[1][:80]}:'" if found else otherwise


def _read_text(path: str) -> str:
    """Read a config file: UTF-8, or UTF-16 with a byte order mark."""
    try:
        content = read_regular(beside_code(Path(path)), MAX_BYTES)
    except FileNotFoundError:
        names = {Path(name).stem: name for name in _configs_in(Path(path).parent, "configs")}
        siblings = Path(path).parent.parent.glob(f"*/{glob.escape(Path(path).name)}")
        folders = {file.parent.name: str(file) for file in siblings}  # in out/NAME/config.yaml
        available = f"allowed: {', '.join(names.values())}"
        in_folder = did_you_mean(Path(path).parent.name, folders, available)
        hint = did_you_mean(Path(path).stem, names, in_folder)
        raise ConfigError(f"no such config; {hint}") from None
    except OSError as error:
        if os.path.isdir(path):
            nearby = ", ".join(_configs_in(path))
            raise ConfigError(f"is a folder; give a config file, such as {nearby}") from None
        raise ConfigError(
            f"cannot be read: {error.strerror}; give a YAML file of settings"
        ) from None
    try:
        return content.decode(
            "utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
        )
    except UnicodeDecodeError as error:
        start = error.start + len(content) - len(error.object)  # counts the byte order mark
        raise ConfigError(f"invalid {error.encoding} at byte {start}; save it as UTF-8") from None


def _configs_in(*folders: str | Path) -> list[str]:
    """Return the first few configs in the folders, or, if there are none, the README's."""
    found = [str(file) for folder in folders for file in sorted(Path(folder).glob("*.yaml"))]
    return found[:12] or ["configs/shakespeare.yaml"]
