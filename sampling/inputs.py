"""What a model is given to read: prompts, typed lines, and the texts of --novel and --score."""

import unicodedata
from collections.abc import Sequence

from common.console import ConfigError, print_stderr
from common.messages import first_few, quoted, quoted_character
from data.text import read_text


def checked_prompt(loaded, text: str, where: str = "prompt") -> str:
    """Return a prompt or a typed line; raise ConfigError if no item could begin with it."""
    (text,) = without_unknown(loaded, [text])
    # a model of a list has only seen single items
    if loaded.item_format and loaded.separator in text:
        separator = quoted(loaded.separator)
        raise ConfigError(f"{where}: {separator} ends an item; give the start of one")

    # a model of answers needs a question; the end of a line may end it
    if loaded.answer_after not in text and loaded.answer_after.endswith("\n"):
        text += "\n"
    if loaded.answer_after not in text:
        raise ConfigError(
            f"{where}: this model answers questions that end in {quoted(loaded.answer_after)}; "
            f"ask one, such as {quoted(loaded.checkpoint.text['question'])}"
        )
    return text


def read_source(loaded, source: str) -> tuple[str, list[str]]:
    """Return the name of a text, and the characters of its files, as training reads them.

    `source` is a file, folder or pattern, as in --sources.
    """
    text = read_text((source,), loaded.checkpoint.settings.data.encoding)
    for note in text.notes:
        print_stderr(note)
    return text.label, without_unknown(loaded, text.contents)


def without_unknown(loaded, texts: Sequence[str]) -> list[str]:
    """Return texts without characters that the model has never read; a note names these.

    A letter typed as `e` and an accent becomes `é` (NFC), unless the model has read both.
    """
    if not set().union(*texts) <= set(loaded.tokenizer.vocabulary):
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    unknown = sorted(set().union(*texts).difference(loaded.tokenizer.vocabulary))
    if unknown:
        print_stderr(f"left out, never read: {first_few(map(quoted_character, unknown))}")
    return [text.translate(dict.fromkeys(map(ord, unknown))) for text in texts]
