"""The corpus: the text of a run, encoded and split into training and validation text."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.errors import CheckpointError, DataError, counted, first_few
from configs.schema import DataConfig
from data.batches import Split
from data.items import ItemFormat, hold_out, split_list
from data.summary import summarize
from data.text import Text, find_text
from data.tokenizer import UNK, CharTokenizer, count_characters, describe

MIN_FILES = 20  # from this many files on, whole files may be held out


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    name         for messages: `tinyshakespeare`, `plays`, `book.txt`
    sources      that were read: those of the settings, or their fallback
    sha256       of the text, as `text.Text` defines it
    val_sha256   of the separate validation text, if there is one
    characters   total number in all files
    summary      lines for the user
    item_format  None if the text is not a list
    question     of a validation item, if items have answers
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
    item_format = ItemFormat.of(data)
    # of each text, the characters of its files; items have ends of their own
    contents = [
        text.contents if item_format else end_with_newlines(text.contents) for text in texts
    ]

    counts_by_text = list(map(count_characters, contents))
    counts = sum(counts_by_text, Counter())
    characters = characters_to_learn(counts, data.min_count, texts[0].path)
    map_unknown = data.min_count > 1
    # a list needs these, however rare
    needed = set(item_format.separator + item_format.answer_after) if item_format else set()
    tokenizer = tokenizer_for(
        characters | needed,
        texts[0].path,
        map_unknown=map_unknown and needed <= set(vocabulary or needed),
        vocabulary=vocabulary,
        add=add_characters,
    )
    encode = partial(tokenizer.encode, map_unknown=map_unknown)

    held_out, question, item_lines = "", "", []
    if item_format:
        train, val, question, item_lines = split_list(texts, item_format, data.val_fraction, encode)
    elif data.val_sources:
        train, val = (join(map(encode, files)) for files in contents)
    else:
        train, val, held_out = split_text(contents[0], data.val_fraction, encode)

    # both need a character to predict, and one to predict it from
    for name, split, text in (("training", train, texts[0]), ("validation", val, texts[-1])):
        if len(split) < 2:
            raise DataError(
                f"{text.path}: {counted(len(split), 'character')} of {name} text; at least 2 are "
                "needed, the second to be predicted from the first; use a longer text"
            )

    summary = summarize(texts, counts_by_text, tokenizer.vocabulary, train, val, held_out)
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
    texts = [find_text(data.sources, data.encoding, data.fallback)]
    if data.val_sources:
        texts.append(find_text(data.val_sources, data.encoding))
        # a validation loss on the training text is meaningless
        if texts[0].sha256 == texts[1].sha256:
            raise DataError(
                f"val_sources: {texts[1].path} is the same text as sources; name another text, or "
                "leave val_sources out to validate on the end of each file"
            )
    for text, sha256 in zip(texts, expected, strict=False):
        if sha256 and text.sha256 != sha256:
            raise CheckpointError(
                f"{text.path} is not the text of this run: SHA-256 {text.sha256}, not {sha256}"
            )
    return texts


def split_text(
    files: Sequence[str], val_fraction: float, encode: Callable[[str], np.ndarray]
) -> tuple[Split, Split, str]:
    """Split a text into training and validation ids; also name the part that is held out.

    With at least MIN_FILES files, hold out whole files, unless their lengths are so unequal that
    less than half or more than twice `val_fraction` of the characters would be held out. Otherwise
    hold out the end of each file: its last `val_fraction`, rounded up.
    """
    if len(files) >= MIN_FILES:
        train, val = hold_out(files, val_fraction)
        share = sum(map(len, val)) / sum(map(len, files))
        if 0.5 <= share / val_fraction <= 2:
            held_out = f"{len(val):,} of {len(files):,} files"
            return join(map(encode, train)), join(map(encode, val)), held_out

    ids = list(map(encode, files))
    cuts = [int(len(file) * (1 - val_fraction)) for file in files]
    train = join(file[:cut] for file, cut in zip(ids, cuts, strict=True))
    val = join(file[cut:] for file, cut in zip(ids, cuts, strict=True))
    of_each = f" of each of {len(files):,} files" if len(files) > 1 else ""
    return train, val, f"the last {100 * val_fraction:g}%{of_each}"


def end_with_newlines(files: Sequence[str]) -> Sequence[str]:
    """Return the contents of files; if there are several, each ends with a newline."""
    if len(files) == 1:
        return files
    # the last line of a file must not run into the first line of the next
    return [file if file.endswith("\n") or not file else f"{file}\n" for file in files]


def join(files: Iterable[np.ndarray]) -> Split:
    """Join the ids of some files into one split."""
    return Split(np.concatenate(list(files)))


def characters_to_learn(counts: Counter[str], min_count: int, path: str) -> set[str]:
    """Return the distinct characters of a text, with UNK in place of the rare ones.

    Raises DataError if there are fewer than two of them.
    """
    # characters that are too rare to learn become one
    frequent = {character for character, count in counts.items() if count >= min_count}
    if len(frequent) < len(counts):
        frequent |= {UNK}

    if not counts:
        raise DataError(f"{path}: the text is empty; use a longer text")
    if len(frequent) == 1:
        often = " that occurs at least data.min_count times" if min_count > 1 else ""
        raise DataError(
            f"{path}: nothing to learn: {describe(*frequent)} is the only character{often}; "
            "use another text"
        )
    return frequent


def tokenizer_for(
    characters: set[str], path: str, *, map_unknown: bool, vocabulary: str | None, add: bool
) -> CharTokenizer:
    """Build the tokenizer for these characters: a new one, or one with a given vocabulary.

    With `add`, the characters that the vocabulary lacks are appended, so no id changes. Otherwise
    raises CheckpointError if there are any, unless they can be mapped to UNK.
    """
    missing = sorted(characters - set(vocabulary or ""))
    if vocabulary is None or add:
        return CharTokenizer((vocabulary or "") + "".join(missing))

    # keep the given vocabulary: it must have UNK for the characters it lacks
    if missing and not (map_unknown and UNK in vocabulary):
        raise CheckpointError(
            f"{path}: {len(missing)} of its characters are not in the checkpoint's "
            f"vocabulary: {first_few(map(describe, missing))}; remove them from the text, or start "
            "a new run with --init_from=CKPT --new_characters=add"
        )
    return CharTokenizer(vocabulary)
