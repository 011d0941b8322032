"""Strange and random YAML: whatever a config file contains, it is settings or some faults."""

import itertools
import os
import random

import pytest

from common.errors import ConfigError
from configs.command import MAX_FAULTS, parse_train, read_config
from configs.fields import settings_of
from configs.schema import Config
from tests.texts import write

WORDS = [
    *settings_of(Config), *"{}[],:-?&*!|>%@`'\"#\n\t\\~\x85é", "\n", ": ", "- ", "? ", "&a ", "*a",
    "<<", "---\n", "...\n", "!!set ", "!!binary ", "\n  ", "1e3", "true", '"\\x',
]  # fmt: skip


YAML_TEXTS = [  # tags, aliases, keys and documents that Python cannot or must not have
    "seed: !!python/object/apply:os.mkdir [constructed]\n", "seed: !!python/name:os.mkdir\n",
    "seed: 1\n---\nseed: 2\n", "<<: {seed: 1}\n", "seed: &a {n_head: 4}\nn_head: *a\n",
    "? [a]\n: 1\n", 'out_dir: "\\Uffffffff"\n', "seed: &a [*a]\n", "sources: &a [[*a], *a]\n",
    # each list has the one before it nine times: written out, it would fill the memory
    "".join(f"{key}: &{key} [{', '.join(['*' + old] * 9)}]\n"
            for old, key in itertools.pairwise("abcdefghijkl")).replace("*a", "x")
    + "sources: *l\n? *l\n: 1\n",
]  # fmt: skip


@pytest.mark.parametrize("text", YAML_TEXTS, ids=lambda text: ascii(text[:30]))
def test_whatever_the_yaml_it_has_settings_or_is_refused_in_one_line_and_constructs_nothing(
    text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = write(f"{tmp_path}/config.yaml", text)
    try:
        settings = parse_train([file]).settings_in_file
    except ConfigError as error:
        assert all(line.startswith(f"{file}: ") and len(line) < 400 for line in error.args)
    else:
        assert {type(value) for value in settings.values()} <= {int, str, bool, tuple}
    assert os.listdir() == ["config.yaml"]


def test_no_text_of_yaml_ends_in_a_traceback(monkeypatch):
    monkeypatch.setattr("configs.command._read", lambda text: text)
    draw = random.Random(0)
    for _ in range(1000):
        text = "".join(draw.choices(WORDS, k=draw.randint(1, 30)))
        if draw.random() < 0.5:  # a file that begins well
            text = f"n_layer: 2\nsources: [a, b]\n{text}"
        try:
            settings = read_config(text)
        except ConfigError as error:
            assert 1 <= len(error.args) <= MAX_FAULTS
        else:
            assert settings.keys() <= settings_of(Config).keys()
