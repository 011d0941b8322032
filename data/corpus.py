"""Characters -> ids: the corpus of a run is its text, split into two parts and encoded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from common.console import DataError
from common.messages import counted
from configs.schema import DataConfig
from data.batches import Split
from data.items import ItemFormat, split_items
from data.text import Text, read_text
from data.tokenizer import CharTokenizer, distinct_characters


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    text         where it is from, without its characters: the ids are enough
    val_sha256   of the separate validation text, if there is one
    summary      lines for the user
    item_format  None if the text is not a list
    question     that of a validation item, if items have answers
    """

    text: Text
    val_sha256: str | None
    tokenizer: CharTokenizer
    train: Split
    val: Split
    summary: list[str]
    item_format: ItemFormat | None = None
    question: str = ""


def load_corpus(data: DataConfig, vocabulary: str = "") -> Corpus:
    """Read the sources, split them into training and validation text, and encode both.

    A run that starts from saved weights passes their `vocabulary`. Characters that it lacks are
    appended, so no id changes. Raises DataError for a text that is unavailable, unreadable or too
    small.
    """
    texts = [read_text(data.sources, data.encoding, "sources", data.fallback)]
    if data.val_sources:
        texts.append(read_text(data.val_sources, data.encoding, "val_sources"))
    text = texts[0]
    val_sha256 = texts[1].sha256 if data.val_sources else None

    # the characters of the two parts
    item_format, question = ItemFormat.from_settings(data), ""
    if item_format:
        lists = [item_format.items_of(text.label, text.contents) for text in texts]
        items = split_items(lists, data.val_fraction)
        parts, question = map(item_format.join_items, items), item_format.question(items[1][0])
    elif data.val_sources:
        parts = ("".join(text.contents) for text in texts)
    else:
        parts = hold_out_ends(text.contents, data.val_fraction)
    train_text, val_text = parts
    distinct = distinct_characters(train_text) | distinct_characters(val_text)
    if min(len(train_text), len(val_text), len(distinct)) < 2:
        raise DataError(f"{text.label}: too few characters to train and validate, or all the same")

    # their ids
    tokenizer = CharTokenizer(vocabulary + "".join(sorted(distinct - set(vocabulary))))
    if item_format:
        train, val = (item_format.encode_items(part, tokenizer.encode) for part in items)
    else:
        train, val = Split(tokenizer.encode(train_text)), Split(tokenizer.encode(val_text))

    summary = summarize(texts, train, val, len(distinct), item_format)
    # is any of 20 passages of the validation text, or of its items, in the training text too?
    starts = np.linspace(0, len(val_text) - 200, 20 * (len(val_text) >= 200)).astype(int)
    pieces = items[1] if item_format else [val_text[start : start + 200] for start in starts]
    known = set(items[0]) if item_format else train_text
    if leaked := sum(piece in known for piece in pieces):
        summary.append(
            f"note: {leaked:,} of {len(pieces):,} pieces of the validation text are in the "
            "training text too, so the validation loss is too low; is part of it duplicated?"
        )
    text = replace(text, contents=[])
    return Corpus(text, val_sha256, tokenizer, train, val, summary, item_format, question)


def hold_out_ends(files: Sequence[str], val_fraction: float) -> tuple[str, str]:
    """Hold out the end of each file for validation: its last `val_fraction`, rounded up."""
    cuts = [(file, int(len(file) * (1 - val_fraction))) for file in files]
    return "".join(file[:cut] for file, cut in cuts), "".join(file[cut:] for file, cut in cuts)


def summarize(
    texts: Sequence[Text], train: Split, val: Split, distinct: int, item_format: ItemFormat | None
) -> list[str]:
    """Return lines for the user: what was read, how it is divided, and notes."""
    names = ", validation ".join(text.label for text in texts)
    files, size = counted(sum(len(text.contents) for text in texts), "file"), len(train) + len(val)
    unit, sizes = "character", (len(train), len(val))
    notes = [note for text in texts for note in text.notes]
    if item_format:
        unit, sizes = "item", (len(train.documents), len(val.documents))
        if sizes[1] < 10:
            notes.append(f"{counted(sizes[1], unit)} to validate on; their loss says little")
    return [
        f"text        {names}: {files}, {size:,} characters, {distinct:,} distinct",
        f"split       {counted(sizes[0], unit)} to train on, {sizes[1]:,} "
        f"({sizes[1] / sum(sizes):.1%}) to validate on",
        *(f"note: {note}" for note in notes),
    ]


def length_advice(corpus: Corpus, block_size: int) -> str | None:
    """Return a note if items are longer than the context, or the training text is shorter."""
    if corpus.item_format:
        longest = int(max(corpus.train.lengths.max(), corpus.val.lengths.max()))
        note = f"note: block_size {block_size} is too short for items of {longest:,} characters"
        return note if longest > block_size else None
    enough = len(corpus.train) - 1
    note = f"note: the training text is shorter than the context: --block_size={enough} is enough"
    return note if enough < block_size else None
