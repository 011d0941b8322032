"""Random YAML: whatever a config file contains, it is settings or a list of faults."""

import random

from common.errors import ConfigError
from configs.command import MAX_FAULTS, read_config
from configs.fields import settings_of
from configs.schema import Config

WORDS = [
    *settings_of(Config), *"{}[],:-?&*!|>%@`'\"#\n\t\\~\x85é", "\n", ": ", "- ", "? ", "&a ", "*a",
    "<<", "---\n", "...\n", "!!set ", "!!binary ", "\n  ", "1e3", "true", '"\\x',
]  # fmt: skip


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
