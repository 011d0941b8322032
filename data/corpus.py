"""The corpus: the text of a run, encoded and split into training and validation text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import CheckpointError, DataError
from common.words import first_few, plural, quoted_character
from configs.schema import DataConfig
from data.batches import Split
from data.items import ItemFormat, split_list
from data.summary import summarize
from data.text import Text, find_text
from data.tokenizer import UNK, CharTokenizer, count_characters


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    name         for messages: `tinyshakespeare`, `plays`, `book.txt`
    sources      the sources that were read: those of the settings, or their fallback
    sha256       of the text, as data.text.Text defines it
    val_sha256   of the separate validation text, if there is one
    characters   number of characters in all files
    summary      lines for the user
    item_format  None if the text is not a list
    question     that of a validation item, if items have answers
    """

    name: str
    sources: tuple[str, ...]
    sha256: str
    val_sha256: str | None
    characters: int
    tokenizer: CharTokenizer
    train: Split
    val: Split
    summary: list[str]
    item_format: ItemFormat | None = None
    question: str = ""


def load_corpus(
    data: DataConfig,
    *,
    expected: tuple[str | None, str | None] = (None, None),
    vocabulary: str | None = None,
    add_characters: bool = False,
) -> Corpus:
    """Read the sources and encode them into training and validation ids.

    A resumed run passes the `expected` SHA-256 of its text and of its validation text. A run that
    starts from saved weights passes their `vocabulary`; `add_characters` adds the characters it
    lacks.

    Raises DataError for a text that is unavailable, unreadable or too small, CheckpointError for
    another text than the expected one or if the vocabulary lacks characters of the text.
    """
    texts = read_texts(data, expected)
    item_format = ItemFormat.from_settings(data)
    if item_format:
        lists = [item_format.items_of(text.path, text.files) for text in texts]
        contents = [[item_format.join(items)] for items in lists]
    else:
        contents = [end_with_newlines(text.files) for text in texts]

    # characters that are too rare to learn become UNK, but not those that a list needs
    text_counts = list(map(count_characters, contents))
    counts = sum(text_counts, Counter())
    needed = set(item_format.separator + item_format.answer_after) if item_format else set()
    rare = {c for c, count in counts.items() if count < data.min_count} - needed
    characters = counts.keys() - rare | needed | ({UNK} if rare else set())
    if len(characters) < 2:
        raise DataError(
            f"{texts[0].path}: nothing to learn: {plural(len(characters), 'distinct character')}; "
            "use another text"
        )
    tokenizer = tokenizer_for(characters, needed, texts[0].path, vocabulary, add_characters)

    encode, question, item_lines = tokenizer.encode, "", []
    if item_format:
        paths = [text.path for text in texts]
        train, val, question, item_lines = split_list(
            paths, lists, item_format, data.val_fraction, encode
        )
    elif data.val_sources:
        train, val = (join(map(encode, files)) for files in contents)
    else:
        train, val = split_files(list(map(encode, contents[0])), data.val_fraction)

    # both need a character to predict, and one to predict it from
    for name, split, text in (("training", train, texts[0]), ("validation", val, texts[-1])):
        if len(split) < 2:
            raise DataError(
                f"{text.path}: {plural(len(split), 'character')} of {name} text; at least 2 are "
                "needed, the second to be predicted from the first; use a longer text"
            )

    summary = summarize(texts, text_counts, tokenizer.vocabulary, train, val, data.max_val)
    return Corpus(
        name=texts[0].name,
        sources=texts[0].sources,
        sha256=texts[0].sha256,
        val_sha256=texts[1].sha256 if data.val_sources else None,
        characters=counts.total(),
        tokenizer=tokenizer,
        train=train,
        val=val,
        summary=summary + item_lines,
        item_format=item_format,
        question=tokenizer.decode(encode(question)),  # without rare characters
    )


def read_texts(data: DataConfig, expected: tuple[str | None, str | None]) -> list[Text]:
    """Read the training text and, if there is a separate one, the validation text."""
    train_text = find_text(data.sources, data.encoding, data.fallback, "--sources")
    texts = [train_text]
    if data.val_sources:
        val_text = find_text(data.val_sources, data.encoding, option="--val_sources")
        texts.append(val_text)
        # a validation loss on the training text is meaningless
        if train_text.sha256 == val_text.sha256:
            raise DataError(
                f"val_sources: {val_text.path} is the same text as sources; name another text, or "
                "leave val_sources out to validate on the end of each file"
            )
    for text, sha256 in zip(texts, expected, strict=False):
        if sha256 and text.sha256 != sha256:
            raise CheckpointError(
                f"{text.path} is not the text of this run: SHA-256 {text.sha256}, not {sha256}"
            )
    return texts


def split_files(files: Sequence[np.ndarray], val_fraction: float) -> tuple[Split, Split]:
    """Hold out the end of each file for validation: its last `val_fraction`, rounded up."""
    cuts = [int(len(ids) * (1 - val_fraction)) for ids in files]
    train = join(ids[:cut] for ids, cut in zip(files, cuts, strict=True))
    return train, join(ids[cut:] for ids, cut in zip(files, cuts, strict=True))


def end_with_newlines(files: Sequence[str]) -> Sequence[str]:
    """Return the contents of files; if there are several, each ends with a newline."""
    if len(files) == 1:
        return files
    # the last line of a file must not run into the first line of the next
    return [file if file.endswith("\n") or not file else f"{file}\n" for file in files]


def join(files: Iterable[np.ndarray]) -> Split:
    """Join the ids of some files into one split."""
    return Split(np.concatenate(list(files)))


def tokenizer_for(
    characters: set[str], needed: set[str], path: str, vocabulary: str | None, add: bool
) -> CharTokenizer:
    """Build the tokenizer for these characters: a new one, or one with a given vocabulary.

    With `add`, characters that the vocabulary lacks are appended, so no id changes. Otherwise UNK
    stands for them. Raises CheckpointError if there is no UNK, or if they are `needed` themselves.
    """
    missing = sorted(characters - set(vocabulary or ""))
    if vocabulary is None or add:
        return CharTokenizer((vocabulary or "") + "".join(missing))
    if missing and (UNK not in vocabulary or needed & set(missing)):
        names = first_few(map(quoted_character, missing))
        raise CheckpointError(
            f"{path}: {len(missing)} of its characters are not in the checkpoint's vocabulary: "
            f"{names}; remove them from the text, or start a new run with --init_from=CKPT "
            "--new_characters=add"
        )
    return CharTokenizer(vocabulary)
