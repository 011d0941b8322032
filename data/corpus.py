"""The corpus: the first available source, encoded and split into training and validation text."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from common.errors import CheckpointError, DataError, first_few
from configs.schema import DataConfig
from data.batches import Split
from data.items import ItemFormat, load_items
from data.summary import summarize
from data.text import find_text
from data.tokenizer import UNK, CharTokenizer, count_characters, describe


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    name        for messages: `tinyshakespeare`, `plays`, `book.txt`
    sha256      of the text, as `text.Text` defines it
    val_sha256  of the validation text, if that is a text of its own
    characters  in all files together
    summary     lines for the user
    item_format for a list; None: the text is one piece
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


def load_corpus(
    data: DataConfig,
    *,
    sha256s: tuple[str | None, str | None] = (None, None),
    vocabulary: str | None = None,
    add_characters: bool = False,
) -> Corpus:
    """Load the first available source and encode it into training and validation ids.

    A resumed run passes the `sha256s` of its text and of its validation text: only these texts are
    used, wherever they are in the lists. With `vocabulary` (a run that starts from saved
    weights), the text is encoded with that vocabulary; `add_characters` adds the text's other
    characters to it.

    Raises DataError for a text that is unavailable, unreadable or too small, CheckpointError if a
    text with these SHA-256s is missing or the vocabulary lacks characters of the text.
    """
    # find the texts, download one if necessary, and read them into memory
    texts = [find_text(data, "sources", sha256s[0])]
    if data.val_sources:
        texts.append(find_text(data, "val_sources", sha256s[1]))
        if texts[0].sha256 == texts[1].sha256:
            raise DataError(
                f"data.val_sources: {texts[1].path} is the same text as data.sources; name "
                "another text, or leave val_sources out to validate on the end of each file"
            )

    # the characters give the vocabulary, and that the ids
    text_counts = [count_characters(text.files) for text in texts]
    counts = sum(text_counts, Counter())
    tokenizer = _tokenizer_for(counts, texts[0].path, data.min_count, vocabulary, add_characters)
    encode = partial(tokenizer.encode, map_unknown=data.min_count > 1)

    # the items of a list, two texts, or one with a part to validate on
    item_format, item_lines = ItemFormat.of(data), []
    if item_format:
        train, val, item_lines = load_items(texts, item_format, data.val_fraction, encode)
    elif data.val_sources:
        train, val = (_whole(text.files, encode) for text in texts)
    else:
        train, val = _split(_whole(texts[0].files, encode), data.val_fraction)
    return Corpus(
        name=texts[0].name,
        sha256=texts[0].sha256,
        val_sha256=texts[1].sha256 if data.val_sources else None,
        characters=counts.total(),
        tokenizer=tokenizer,
        train=train,
        val=val,
        summary=[
            *summarize(texts, text_counts, tokenizer.vocabulary, train, val),
            *item_lines,
        ],
        item_format=item_format,
    )


def check_sizes(corpus: Corpus, block_size: int) -> None:
    """Raise DataError unless both splits hold at least one window of `block_size` predictions."""
    if corpus.item_format:
        return  # any item is enough
    longest_segment = {
        name: max(end - start for start, end in split.segments)
        for name, split in (("training", corpus.train), ("validation", corpus.val))
    }
    name = min(longest_segment, key=longest_segment.get)
    max_block_size = longest_segment[name] - 1
    if max_block_size >= block_size:
        return
    remedy = "no block_size fits; use a longer text"
    if max_block_size > 0:
        remedy = (
            f"the largest block_size that fits is {max_block_size}; set that or use a longer text"
        )
    raise DataError(
        f"{corpus.name}: the longest piece of {name} text has {longest_segment[name]:,} "
        f"characters; block_size {block_size} needs {block_size + 1:,}; {remedy}"
    )


def _whole(files: Sequence[str], encode: Callable[[str], np.ndarray]) -> Split:
    """Encode the files of a text into one split, with a segment for each."""
    segments = tuple(pairwise(accumulate(map(len, files), initial=0)))
    return Split(np.concatenate([encode(file) for file in files]), segments)


def _split(whole: Split, fraction: float) -> tuple[Split, Split]:
    """Split each file: the last `fraction`, rounded up, is validation text."""
    cuts = [start + int((end - start) * (1 - fraction)) for start, end in whole.segments]
    train = tuple((start, cut) for (start, _), cut in zip(whole.segments, cuts, strict=True))
    val = tuple((cut, end) for (_, end), cut in zip(whole.segments, cuts, strict=True))
    return Split(whole.ids, train), Split(whole.ids, val)


def _tokenizer_for(
    counts: Counter[str], path: Path, min_count: int, vocabulary: str | None, add_characters: bool
) -> CharTokenizer:
    """Build the tokenizer of a text.

    A given vocabulary must contain the text's characters; `add_characters` appends those it lacks,
    so that no id changes.
    """
    if not counts:
        raise DataError(f"{path}: the text is empty; use a longer text")
    own = {character for character, count in counts.items() if count >= min_count}
    if len(own) < len(counts):
        own |= {UNK}
    if len(own) == 1:
        often = " that occurs at least data.min_count times" if min_count > 1 else ""
        raise DataError(
            f"{path}: nothing to learn: {describe(*own)} is the only character{often}; "
            "use another text"
        )
    missing = sorted(own - set(vocabulary or ""))
    if vocabulary is None or add_characters:
        return CharTokenizer((vocabulary or "") + "".join(missing))
    if missing and not (min_count > 1 and UNK in vocabulary):
        raise CheckpointError(
            f"{path}: {len(missing)} of its characters are not in the checkpoint's "
            f"vocabulary: {first_few(map(describe, missing))}; remove them from the text, or start "
            "a new run with --init_from=CKPT --new_characters=add"
        )
    return CharTokenizer(vocabulary)
