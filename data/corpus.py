"""The corpus: the first available source, encoded and split into training and validation text."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np

from common.errors import CheckpointError, DataError, first_few
from configs.schema import DataConfig
from data.batches import Split
from data.disk_cache import StoredIds
from data.download import Unavailable
from data.items import ItemFormat, load_items
from data.streaming import StreamedText
from data.summary import summarize, total_counts
from data.text_files import Source, Text
from data.tokenizer import UNK, CharTokenizer, describe


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    name        for messages: `tinyshakespeare`, `plays`, `book.txt`
    sha256      of the text, as `text_files.Text` defines it
    val_sha256  of the validation text, if that is a text of its own
    characters  in all files together
    summary     lines for the user
    item_format of a list; None: the text is one piece
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
    sources: Sequence[str],
    *,
    notify: Callable[[str], None],
    encoding: str = "utf-8",
    newlines: str = "keep",
    min_count: int = 1,
    val_sources: Sequence[str] = (),
    val_fraction: float = 0.1,
    separator: str = "",
    answer_after: str = "",
    wanted_sha256: str | None = None,
    wanted_val_sha256: str | None = None,
    vocabulary: str | None = None,
    add_characters: bool = False,
) -> Corpus:
    """Load the first available source and encode it into training and validation ids.

    The settings are those of DataConfig. A source is a file, a folder (its *.txt files, sorted by
    name, are one corpus), a pattern such as `books/**/*.md`, or an address,
    `https://.../STEM.txt#sha256=HEX`, which is downloaded once to `data/STEM/input.txt`. A relative
    path is looked for under the current folder, then beside the code. A text at
    `data/NAME/input.txt` is also looked for as `NAME/input.txt` in the folder $HORNBOOK_CORPORA,
    before any download.

    With `wanted_sha256` (a resumed run), only the text with that digest is used, wherever it is in
    the list. With `vocabulary` (a run that starts from saved weights), the text is encoded with
    that vocabulary; `add_characters` adds the text's other characters to it. `notify` gets a line
    about a download with the wrong digest.

    Raises DataError for a text that is unavailable, unreadable or too small, CheckpointError if the
    wanted text is missing or the vocabulary lacks characters of the text, ResourceError if the disk
    cache has no space for a large text.
    """
    chosen = [_choose("data.sources", sources, wanted_sha256, notify)]
    if val_sources:
        chosen.append(_choose("data.val_sources", val_sources, wanted_val_sha256, notify))
    if val_sources and chosen[0].text.sha256 == chosen[1].text.sha256:
        raise DataError(
            f"data.val_sources: {chosen[1].text.path} is the same text as data.sources; name "
            "another text, or leave val_sources out to validate on the end of each file"
        )
    texts = [StreamedText(choice.text, encoding, newlines) for choice in chosen]
    counts, path = total_counts(texts), chosen[0].text.path
    tokenizer = _tokenizer_for(counts, path, min_count, vocabulary, add_characters)
    item_format, item_lines = None, []
    if separator:
        item_format = ItemFormat.of(DataConfig(separator=separator, answer_after=answer_after))
        encode = partial(tokenizer.encode, map_unknown=min_count > 1)
        train, val, item_lines = load_items(texts, item_format, val_fraction, encode)
    ids = [text.ids(tokenizer, map_unknown=min_count > 1) for text in texts]
    file_spans = [list(pairwise(accumulate(text.char_counts.lengths, initial=0))) for text in texts]
    if separator:
        pass
    elif val_sources:
        train, val = Split(ids[0], tuple(file_spans[0])), Split(ids[1], tuple(file_spans[1]))
    else:
        train, val = _split(ids[0], file_spans[0], val_fraction)
    return Corpus(
        name=chosen[0].source.name,
        sha256=chosen[0].text.sha256,
        val_sha256=chosen[1].text.sha256 if val_sources else None,
        characters=sum(map(len, ids)),
        tokenizer=tokenizer,
        train=train,
        val=val,
        summary=[
            *chain(*map(_describe_choice, chosen, texts)),
            *_note_rare_but_kept(total_counts(texts), min_count, vocabulary),
            *summarize(texts, tokenizer, train, val, item_lines),
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


@dataclass(frozen=True)
class _Choice:
    """The first available one of several sources, and why those before it are unavailable."""

    setting: str
    first: Source
    source: Source
    text: Text
    unavailable: list[str]


def _choose(
    setting: str, sources: Sequence[str], wanted: str | None, notify: Callable[[str], None]
) -> _Choice:
    """Return the first available source; with `wanted`, the one with that SHA-256."""
    alternatives = [Source.parse(source) for source in sources]
    unavailable = []
    # A resumed run searches this machine before it downloads anything.
    for source in sorted(alternatives, key=lambda s: wanted is not None and s.url is not None):
        try:
            text = source.find(wanted, notify)
            return _Choice(setting, alternatives[0], source, text, unavailable)
        except Unavailable as reason:
            unavailable.append(f"{source.label} ({reason})")
    reasons = ", ".join(unavailable)
    if wanted:
        raise CheckpointError(
            f"{setting}: the text has changed since the checkpoint, which was trained on SHA-256 "
            f"{wanted}; found instead: {reasons}; restore that text, start a new run, or "
            "continue with --allow_data_change"
        )
    hint = alternatives[-1].suggestion("name an existing file, folder or address")
    raise DataError(f"{setting}: no text is available: {reasons}; {hint}")


def _describe_choice(choice: _Choice, text: StreamedText) -> Iterator[str]:
    """Yield the chosen text and its size, then why the sources before it were not used."""
    kind = "text" if choice.setting == "data.sources" else "validation text"
    files = f"{len(text.text.files):,} files, " * (len(text.text.files) > 1)
    counts = text.char_counts
    yield (
        f"{kind}: {choice.text.path}, {files}"
        f"{sum(counts.lengths):,} characters, {len(counts.counts):,} distinct"
    )
    if choice.source.name != choice.first.name:
        yield f"note: losses on {choice.source.name} and {choice.first.name} are not comparable"
    if choice.unavailable:
        yield f"note: not available: {', '.join(choice.unavailable)}"


def _note_rare_but_kept(
    counts: Counter[str], min_count: int, vocabulary: str | None
) -> Iterator[str]:
    """Yield a note if a given vocabulary has characters that a new one would omit as rare."""
    rare = {c for c in counts if counts[c] < min_count} & set(vocabulary or "") - {UNK}
    if rare:
        yield (
            f"note: data.min_count={min_count}: {len(rare):,} rare characters are kept, because "
            f"the checkpoint's vocabulary has them"
        )


def _split(
    ids: np.ndarray | StoredIds, file_spans: Sequence[tuple[int, int]], fraction: float
) -> tuple[Split, Split]:
    """Split each file's (start, end) span: the last `fraction`, rounded up, is validation text."""
    cuts = [start + int((end - start) * (1 - fraction)) for start, end in file_spans]
    train = tuple((start, cut) for (start, _), cut in zip(file_spans, cuts, strict=True))
    val = tuple((cut, end) for (_, end), cut in zip(file_spans, cuts, strict=True))
    return Split(ids, train), Split(ids, val)


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
        often = " that occurs at least data.min_count times" * (min_count > 1)
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
