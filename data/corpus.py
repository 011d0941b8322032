"""The corpus: the first available source, encoded and split into training and validation text."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from common.errors import CheckpointError, DataError, counted, first_few
from configs.schema import DataConfig
from data.batches import Split
from data.items import ItemFormat, split_list, train_val
from data.summary import summarize
from data.text import find_text
from data.tokenizer import UNK, CharTokenizer, count_characters, describe

MIN_FILES = 20  # with so many files, whole ones can validate


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    name        for messages: `tinyshakespeare`, `plays`, `book.txt`
    sha256      of the text, as `text.Text` defines it
    val_sha256  of the validation text, if that is a text of its own
    characters  in all files together
    summary     lines for the user
    item_format for a list; None: the text is one piece
    question    of an item that validates, if items have answers
    """

    name: str
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
    sha256s: tuple[str | None, str | None] = (None, None),
    vocabulary: str | None = None,
    add_characters: bool = False,
    name_unused: bool = False,
) -> Corpus:
    """Load the first available source and encode it into training and validation ids.

    A resumed run passes the `sha256s` of its text and of its validation text, and gets these texts
    or an error. A run that starts from saved weights passes their `vocabulary`; `add_characters`
    adds what it lacks. With `name_unused`, a note names the sources after the one that is used.

    Raises DataError for a text that is unavailable, unreadable or too small, CheckpointError if a
    text with these SHA-256s is missing or the vocabulary lacks characters of the text.
    """
    # find the texts, download one if necessary, and read them into memory
    texts = [find_text(data, "sources", sha256s[0], name_unused)]
    if data.val_sources:
        texts.append(find_text(data, "val_sources", sha256s[1]))
        # a loss on what the model has learned by heart says nothing
        if texts[0].sha256 == texts[1].sha256:
            raise DataError(
                f"data.val_sources: {texts[1].path} is the same text as data.sources; name "
                "another text, or leave val_sources out to validate on the end of each file"
            )

    # the items of a list stay apart; all other files are joined
    item_format = ItemFormat.of(data)
    files = [text.files if item_format else text.files_to_join() for text in texts]

    # the characters give the vocabulary, and the vocabulary the ids
    text_counts = list(map(count_characters, files))
    counts = sum(text_counts, Counter())
    tokenizer = tokenizer_for(counts, texts[0].path, data.min_count, vocabulary, add_characters)
    encode = partial(tokenizer.encode, map_unknown=data.min_count > 1)

    # one part to train on, one to validate on
    validates, question, item_lines = "", "", []
    if item_format:
        train, val, question, item_lines = split_list(texts, item_format, data.val_fraction, encode)
    elif data.val_sources:
        train, val = (join(map(encode, part)) for part in files)
    else:
        train, val, validates = split_text(files[0], data.val_fraction, encode)

    # is there anything to predict in both?
    for name, part in (("training", train), ("validation", val)):
        if len(part) < 2:
            raise DataError(
                f"{texts[-1].path}: {counted(len(part), 'character')} of {name} text; at least 2 "
                "are needed, the second to be predicted from the first; use a longer text"
            )

    # what the start prints about it
    summary = summarize(texts, text_counts, tokenizer.vocabulary, train, val, validates)
    return Corpus(
        name=texts[0].name,
        sha256=texts[0].sha256,
        val_sha256=texts[1].sha256 if data.val_sources else None,
        characters=counts.total(),
        tokenizer=tokenizer,
        train=train,
        val=val,
        summary=summary + item_lines,
        item_format=item_format,
        question=question,
    )


def split_text(
    files: Sequence[str], val_fraction: float, encode: Callable[[str], np.ndarray]
) -> tuple[Split, Split, str]:
    """Split a text into training and validation ids; also say which part validates.

    Of MIN_FILES files or more, whole files validate, unless their lengths are so unequal that these
    have less than half or more than twice `val_fraction` of the characters. Otherwise the end of
    each file validates: its last `val_fraction`, rounded up.
    """
    # whole files, if that is fair
    if len(files) >= MIN_FILES:
        train, val = train_val(files, val_fraction)
        # a few of them may be most of the text, or next to nothing
        share = sum(map(len, val)) / sum(map(len, files))
        if 0.5 <= share / val_fraction <= 2:
            validates = f"{len(val):,} of {len(files):,} files"
            return join(map(encode, train)), join(map(encode, val)), validates

    # or the end of each
    ids = list(map(encode, files))
    cuts = [int(len(file) * (1 - val_fraction)) for file in files]
    train = join(file[:cut] for file, cut in zip(ids, cuts, strict=True))
    val = join(file[cut:] for file, cut in zip(ids, cuts, strict=True))
    of_each = f" of each of {len(files):,} files" if len(files) > 1 else ""
    return train, val, f"the last {100 * val_fraction:g}%{of_each}"


def join(files: Iterable[np.ndarray]) -> Split:
    """Join the ids of some files into one split."""
    return Split(np.concatenate(list(files)))


def tokenizer_for(
    counts: Counter[str], path: Path, min_count: int, vocabulary: str | None, add_characters: bool
) -> CharTokenizer:
    """Build the tokenizer of a text.

    A given vocabulary must contain the text's characters; `add_characters` appends those it lacks,
    so that no id changes.
    """
    # characters that are too rare to learn become one
    frequent = {character for character, count in counts.items() if count >= min_count}
    if len(frequent) < len(counts):
        frequent |= {UNK}

    # is there anything to learn?
    if not counts:
        raise DataError(f"{path}: the text is empty; use a longer text")
    if len(frequent) == 1:
        often = " that occurs at least data.min_count times" if min_count > 1 else ""
        raise DataError(
            f"{path}: nothing to learn: {describe(*frequent)} is the only character{often}; "
            "use another text"
        )

    # a new vocabulary, or the given one, with new characters at its end
    missing = sorted(frequent - set(vocabulary or ""))
    if vocabulary is None or add_characters:
        return CharTokenizer((vocabulary or "") + "".join(missing))

    # the given one as it is: characters that it lacks must be able to become UNK
    if missing and not (min_count > 1 and UNK in vocabulary):
        raise CheckpointError(
            f"{path}: {len(missing)} of its characters are not in the checkpoint's "
            f"vocabulary: {first_few(map(describe, missing))}; remove them from the text, or start "
            "a new run with --init_from=CKPT --new_characters=add"
        )
    return CharTokenizer(vocabulary)
