"""From a list of sources to the ids of a training and a validation split: the first source that can
be had is taken.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from common.errors import CheckpointError, DataError, escape, first_few
from data.batches import Split
from data.download import Unavailable
from data.streaming import Passes
from data.summary import counts_of, report
from data.text_files import Source, Text
from data.tokenizer import FOLDED, CharTokenizer, named


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split and encoded.

    name        for people: `tinyshakespeare`, `plays`, `book.txt`
    sha256      of its bytes, as `data.text_files.Text` has it
    val_sha256  the same of the text to validate on, where that is one of its own
    characters  in all files together
    report      what was found, in lines for people
    """

    name: str
    sha256: str
    val_sha256: str | None
    characters: int
    tokenizer: CharTokenizer
    train: Split
    val: Split
    report: list[str]


def load_corpus(
    sources: Sequence[str],
    *,
    notify: Callable[[str], None],
    encoding: str = "utf-8",
    newlines: str = "keep",
    min_count: int = 1,
    val_sources: Sequence[str] = (),
    val_fraction: float = 0.1,
    wanted_sha256: str | None = None,
    wanted_val_sha256: str | None = None,
    vocabulary: str | None = None,
) -> Corpus:
    """The first text of `sources` that can be had, split within each file and encoded; the settings
    are DataConfig's.

    A source is a file, a folder (its *.txt files, sorted by name, are one corpus), a pattern such
    as `books/**/*.md` or `https://.../NAME/FILE#sha256=HEX`, which is downloaded once to
    `data/NAME/input.txt`. What is named `data/NAME/input.txt` is also looked for as
    `NAME/input.txt` in the folder $HORNBOOK_CORPORA, before any network.

    With `wanted_sha256` (a resumed run) it is the text with that digest, wherever it stands in the
    list; with `vocabulary` (a run that starts from another's weights) the text is encoded with that
    one, not its own. `notify` hears of a download that was not what it should be.

    Raises ConfigError for a malformed source, DataError for a text that cannot be had, read or
    learned from, CheckpointError if the wanted text is not there or the vocabulary lacks characters
    of the text, ResourceError for a large text without room for its cache.
    """
    choice = _choose("data.sources", sources, wanted_sha256, notify)
    chosen = [
        choice,
        *(
            [_choose("data.val_sources", val_sources, wanted_val_sha256, notify)]
            if val_sources
            else []
        ),
    ]
    texts = [Passes(each.text, encoding, newlines) for each in chosen]
    tokenizer = _tokenizer_for(counts_of(texts), choice.text.place, min_count, vocabulary)
    ids = [text.ids(tokenizer, fold=min_count > 1) for text in texts]
    files = [list(pairwise(accumulate(text.census.lengths, initial=0))) for text in texts]
    if val_sources:
        train, val = (Split(*each) for each in zip(ids, map(tuple, files), strict=True))
    else:
        train, val = _split(ids[0], files[0], val_fraction)
    return Corpus(
        choice.source.name,
        choice.text.sha256,
        chosen[1].text.sha256 if val_sources else None,
        sum(map(len, ids)),
        tokenizer,
        train,
        val,
        [*map(_account, chosen, texts), *report(texts, tokenizer, train, val)],
    )


def check_sizes(corpus: Corpus, block_size: int) -> None:
    """Raise DataError unless both splits hold at least one window of `block_size` predictions."""
    splits = {"training": corpus.train, "validation": corpus.val}
    longest = {
        name: max(end - start for start, end in split.segments) for name, split in splits.items()
    }
    shorter = min(longest, key=longest.get)
    fits = longest[shorter] - 1
    if fits < block_size:
        raise DataError(
            f"{escape(corpus.name)}: the longest stretch of {shorter} text has "
            f"{longest[shorter]:,} characters, "
            f"block_size {block_size} needs {block_size + 1:,}; "
            + (
                f"the largest block_size that fits is {fits}; set that or "
                if fits > 0
                else "no block_size fits; "
            )
            + "take a longer text"
        )


@dataclass(frozen=True)
class _Choice:
    """The first of several alternatives that can be had, and why not one before it."""

    setting: str
    first: Source
    source: Source
    text: Text
    passed_over: list[str]


def _choose(
    setting: str, sources: Sequence[str], wanted: str | None, notify: Callable[[str], None]
) -> _Choice:
    alternatives = [Source.parse(source) for source in sources]
    passed_over = []
    # A resumed run looks through what lies on this machine before it asks the network.
    for source in sorted(alternatives, key=lambda s: wanted is not None and s.url is not None):
        try:
            return _Choice(
                setting, alternatives[0], source, source.find(wanted, notify), passed_over
            )
        except Unavailable as reason:
            passed_over.append(f"{source.label} ({reason})")
    reasons = escape(", ".join(passed_over))
    if wanted:
        raise CheckpointError(
            f"{setting}: the text changed since the checkpoint, which learnt from SHA-256 "
            f"{escape(wanted)}; "
            f"found instead: {reasons}; bring that text back, start a new run, or go on with "
            f"--allow-data-change"
        )
    hint = alternatives[-1].guess("name a file, a folder or an address that is there")
    raise DataError(f"{setting}: no text can be had: {reasons}; {hint}")


def _account(choice: _Choice, text: Passes) -> str:
    """Which text was taken, how large it is, and why it was not another."""
    files = f"{len(text.text.files):,} files, " * (len(text.text.files) > 1)
    line = (
        f"{'text' if choice.setting == 'data.sources' else 'validation text'}: "
        f"{choice.text.place}, {files}"
    )
    line += f"{sum(text.census.lengths):,} characters, {len(text.census.counts):,} distinct"
    if choice.passed_over:
        line += f"; passed over: {', '.join(choice.passed_over)}"
    if choice.source.name != choice.first.name:
        line += f"; losses on {choice.source.name} do not compare with those on {choice.first.name}"
    return escape(line)


def _split(
    ids: np.ndarray, files: Sequence[tuple[int, int]], fraction: float
) -> tuple[Split, Split]:
    """The last `fraction` of each file to validate on, rounded up, the rest to train on."""
    cuts = [start + int((end - start) * (1 - fraction)) for start, end in files]
    train = tuple((start, cut) for (start, _), cut in zip(files, cuts, strict=True))
    val = tuple((cut, end) for (_, end), cut in zip(files, cuts, strict=True))
    return Split(ids, train), Split(ids, val)


def _tokenizer_for(
    counts: Counter[str], place: Path, min_count: int, vocabulary: str | None
) -> CharTokenizer:
    if not counts:
        raise DataError(
            f"{escape(place)}: 0 characters; need at least 10 * block_size + 1; take a longer text"
        )
    own = {character for character, count in counts.items() if count >= min_count}
    own |= {FOLDED} if len(own) < len(counts) else set()
    if len(own) == 1:
        raise DataError(
            f"{escape(place)}: nothing to learn: {named(*own)} is its only character"
            f"{' that occurs data.min_count times' * (min_count > 1)}; take another text"
        )
    if vocabulary is None:
        return CharTokenizer("".join(sorted(own)))
    missing = sorted(own - set(vocabulary))
    if missing and not (min_count > 1 and FOLDED in vocabulary):
        raise CheckpointError(
            f"{escape(place)}: {len(missing)} of its characters are not in the checkpoint's "
            f"vocabulary: "
            f"{first_few(map(named, missing))}; leave them out of the text, or start without the "
            f"checkpoint"
        )
    return CharTokenizer(vocabulary)
