"""Generate text from a checkpoint: python sample.py --ckpt out/shakespeare --prompt "ROMEO:"

`main` loads the model and then calls one of four functions: `print_samples`, `take_turns`, `score`
and `write_html`. The command line is checked first, because importing torch takes seconds.

A model of a *list* was trained with data.separator, which ends each item: names, one a line. Each
of its samples is one item.
"""

import os
import sys

from configs.command import SampleCommand, parse_sample

if __name__ == "__main__":
    COMMAND = parse_sample()  # a mistake is answered before torch, whose import takes seconds
    # model/decode.py multiplies vectors with NumPy: too little work for several threads. NumPy
    # reads this variable when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from common.console import print_error, print_note, print_result, print_text
from common.errors import ConfigError, DataError, UserError
from configs.fields import brief, error_context
from configs.schema import DEFAULT_TEMPERATURE, SampleConfig
from data.batches import Split, evaluation_windows
from data.items import ItemFormat
from data.text import read_text
from data.tokenizer import UNK, CharTokenizer, UnknownCharacter
from model.generate import Generation, Sampler
from page.export import write_page
from run import checkpoint as checkpoints
from training.device import select_runtime
from training.evaluate import (
    BITS_PER_NAT,
    batch_size_for,
    window_losses,
    wrong_segments,
)
from training.resolve import resolve

MAX_BATCH = 64  # samples
MAX_TRIES = 100  # samples to draw for each novel item
MAX_BUFFERED = 2**24  # characters of a batch in memory: the longer the samples, the fewer at once


class StopStrings:
    """Detects the stop string that ends a sample, even if it begins in text already shown.

    Text that may be the start of a stop string is buffered in `pending`.
    """

    def __init__(self, stops: Sequence[str], shown: str):
        self.stops, self.longest = stops, max(map(len, stops), default=0)
        self.tail = shown[max(0, len(shown) - self.longest) :]  # the last `longest` characters
        self.pending, self.reached = "", False

    def feed(self, character: str) -> str:
        """Add a character; return the text that is now certain not to belong to a stop string."""
        if not self.stops or self.reached:
            return "" if self.reached else character
        self.tail = (self.tail + character)[-self.longest :]
        self.pending += character

        # does a stop string end here (of several, the longest), or may one have begun?
        stop = max(filter(self.tail.endswith, self.stops), key=len, default="")
        if stop:
            self.reached, certain = True, len(self.pending) - len(stop)
        else:
            certain = len(self.pending) - self._possible_start()
        certain = max(certain, 0)  # negative if it began in text that is shown already
        output = self.pending[:certain]
        self.pending = "" if stop else self.pending[certain:]
        return output

    def _possible_start(self) -> int:
        """Return the length of the longest suffix of the text that begins a stop string."""
        for n in range(len(self.tail), 0, -1):
            if any(stop.startswith(self.tail[-n:]) for stop in self.stops):
                return n
        return 0


class Session:
    """The loaded model with its tokenizer, and the options."""

    def __init__(self, options: SampleConfig):
        self.options = options
        self.runtime = select_runtime(options.device, options.dtype)
        self.truncated = 0  # samples that max_new_tokens cut off

        # load the checkpoint, into the layout and kernel that the options name
        saved, note = checkpoints.find(Path(options.ckpt), "best")
        if note:
            print_note(note)
        chosen = {"attention": options.attention, "kernel": options.kernel}
        chosen = {name: value for name, value in chosen.items() if value != "saved"}
        resolved = resolve(saved.config, self.runtime, saved.data.epochs).model
        config = dataclasses.replace(resolved, **chosen)
        self.model = checkpoints.build_model(saved, config).to(self.runtime.device)
        self.saved = dataclasses.replace(saved, tensors={})  # the model has a copy
        self.tokenizer = CharTokenizer(self.saved.vocabulary)

        # the items of a list: each is a sample, and the separator ends it
        self.item_format = ItemFormat.of(self.saved.config.data)
        self.stops, self.end = options.stop, "\n"
        if self.item_format:
            self.end = self.item_format.separator
            self.stops += (self.end,)
        elif options.novel:
            raise ConfigError(
                "--novel applies to models of a list, trained with data.separator; leave it out"
            )
        if options.temperature == "auto":  # the likeliest answer to a question; else random text
            answers = self.item_format and self.item_format.answer_after
            self.options = dataclasses.replace(
                options, temperature=0.0 if answers else DEFAULT_TEMPERATURE
            )

        # a stop string must be made of characters that the model can draw
        for stop in options.stop:
            try:
                self.tokenizer.encode(stop)
            except UnknownCharacter as error:
                raise ConfigError(f"--stop {brief(stop)} can never appear: {error}") from None

    def encode(self, text: str) -> np.ndarray:
        """Encode a text; with --unknown=skip, without its unknown characters.

        Otherwise an unknown character raises ConfigError.
        """
        if self.options.unknown == "skip":
            vocabulary = frozenset(self.tokenizer.vocabulary)
            known = "".join(c for c in text if c in vocabulary)
            if len(known) < len(text):
                skipped = len(text) - len(known)
                print_note(f"skipped {skipped:,} characters not in the vocabulary")
            text = known
        try:
            return self.tokenizer.encode(text)
        except UnknownCharacter as error:
            raise ConfigError(f"{error}; --unknown=skip leaves such characters out") from None

    def read(self, path: str) -> str:
        """Read a file in the encoding of the training text."""
        return read_text(Path(path), self.saved.config.data.encoding)

    def encode_whole(self, text: str) -> np.ndarray:
        """Encode a whole text as in training, where min_count maps rare characters to UNK."""
        if self.saved.config.data.min_count > 1 and UNK in self.tokenizer.vocabulary:
            return self.tokenizer.encode(text, map_unknown=True)
        return self.encode(text)

    def begin(self, numbers: Sequence[int], ids: np.ndarray) -> Generation:
        """Start the samples with these numbers, with the prompt; if it is empty, with a newline.

        An item of a list starts as in training, after the end of another. Each sample has random
        numbers of its own, from the seed and its number: the others do not change its text.
        """
        options = self.options
        sampler = Sampler(
            options.seed,
            numbers,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        )
        generation = Generation(
            self.model.to(self.runtime.dtype),
            sampler,
            cache=options.cache,
            notify=print_note,
        )

        # the prompt, once per sample
        if self.item_format:
            ids = np.concatenate([self.tokenizer.encode(self.item_format.start), ids])
        elif not len(ids):
            ids = self.tokenizer.encode(self.tokenizer.start)
        generation.append(np.tile(ids, (len(numbers), 1)))
        return generation

    def append_line(self, generation: Generation, ids: np.ndarray) -> str:
        """Append what was typed, at the beginning of a line; return what was appended."""
        at_start = self.tokenizer.decode(generation.ids[0, -1:]) == "\n"
        if len(ids) and not at_start and "\n" in self.tokenizer.vocabulary:
            ids = np.concatenate([self.tokenizer.encode("\n"), ids])
        generation.append(ids[None])
        return self.tokenizer.decode(ids)

    def generate(self, generation: Generation, stops: Sequence[StopStrings]) -> Iterator[list[str]]:
        """Draw characters until all samples have ended; yield what each adds to the output."""
        for _ in range(self.options.max_new_tokens):
            characters = self.tokenizer.decode(generation.step())  # one for each sample
            yield [stop.feed(c) for stop, c in zip(stops, characters, strict=True)]
            if all(stop.reached for stop in stops):
                return
        self.truncated += sum(not stop.reached for stop in stops)
        yield [stop.pending for stop in stops]


# ----------------------------------------------------------------------------------- the four modes


def print_samples(session: Session, prompt: str) -> None:
    """Print one sample or several, with a heading above each of several, except items.

    A single sample is printed while it is drawn. Several are drawn in batches, which is
    faster, and a batch is printed when it is complete.
    """
    options, ids = session.options, session.encode(prompt)
    block_size = session.model.config.block_size
    if len(ids) > block_size:
        print_note(
            f"the prompt has {len(ids):,} characters; the model sees at most the last "
            f"{block_size:,}"
        )

    if options.novel:
        print_novel(session, ids)
        return
    numbers = range(options.num_samples)
    if options.sample:  # draw only this one; its text is the same as among others
        numbers = range(options.sample - 1, options.sample)
    for batch in batches(session, numbers):
        if len(batch) == 1:
            stream(session, batch, ids)
            continue
        for i, (text, _) in zip(batch, draw_all(session, batch, ids), strict=True):
            print_text(f"{heading(session, i)}{text}{session.end}")


def batches(session: Session, numbers: range) -> Iterator[range]:
    """Yield the numbers of samples to draw at once, as many as memory for their text allows."""
    size = min(MAX_BATCH, max(1, MAX_BUFFERED // max(1, session.options.max_new_tokens)))
    yield from (numbers[i : i + size] for i in range(0, len(numbers), size))


def stream(session: Session, batch: range, ids: np.ndarray) -> None:
    """Print a single sample while it is drawn."""
    prompt = session.tokenizer.decode(ids)
    print_text(heading(session, batch[0]) + prompt)
    stop = StopStrings(session.stops, prompt)
    for (piece,) in session.generate(session.begin(batch, ids), [stop]):
        print_text(piece)
    print_text(session.end)


def draw_all(session: Session, batch: range, ids: np.ndarray) -> list[tuple[str, bool]]:
    """Draw several samples at once; return each text, and whether a stop string ended it."""
    prompt = session.tokenizer.decode(ids)
    stops = [StopStrings(session.stops, prompt) for _ in batch]
    steps = session.generate(session.begin(batch, ids), stops)  # each has a piece per sample
    texts = map("".join, zip(*steps, strict=True))
    return [(prompt + text, stop.reached) for text, stop in zip(texts, stops, strict=True)]


def print_novel(session: Session, ids: np.ndarray) -> None:
    """Print the first samples that are complete items and not among those of --novel."""
    wanted, found = session.options.num_samples, 0
    text = session.read(session.options.novel)
    items = session.item_format.items_of(session.options.novel, [text])
    known = {"", *items}  # an empty item is not novel either
    for batch in batches(session, range(MAX_TRIES * wanted)):
        for text, complete in draw_all(session, batch, ids):
            if complete and text not in known and found < wanted:
                print_text(text + session.end)
                known.add(text)
                found += 1
        session.truncated = 0  # those tries are not printed
        if found == wanted:
            return
    print_note(
        f"--novel: {found:,} of {wanted:,} items found in {MAX_TRIES * wanted:,} tries; raise "
        "--temperature"
    )


def heading(session: Session, i: int) -> str:
    """Return the line above sample i, counted from 0, if there are several; items have none."""
    several = session.options.num_samples > 1 and not session.item_format
    return f"---------- sample {i + 1} ----------\n" if several else ""


def take_turns(session: Session, prompt: str) -> None:
    """Take turns until Ctrl-D: append a typed line to the text, then let the model continue.

    After an empty line the model continues from where it stopped. A stop string ends the turn; it
    stays in the context but is not printed. With a model of a list, each turn is an item: the
    prompt, the typed line and the reply.
    """
    # the prompt; without one, the text begins with the first line that is typed
    ids, number = session.encode(prompt), (session.options.sample or 1) - 1
    generation = session.begin([number], ids) if len(ids) else None
    shown = session.tokenizer.decode(ids)  # may contain the start of a stop string
    print_text(shown)
    end_line(shown)
    while (line := read_line()) is not None:
        # the user's turn
        try:
            ids = session.encode(prompt + line if session.item_format else line)
        except UserError as error:
            print_error(error)
            continue
        if generation is None or session.item_format:
            generation = session.begin([number], ids)
            shown = session.tokenizer.decode(ids)
            number += 1  # of the next item
        else:
            shown += session.append_line(generation, ids)

        # the model's turn
        stop, reply = StopStrings(session.stops, shown), ""
        for (piece,) in session.generate(generation, [stop]):
            print_text(piece)
            reply += piece
        if session.item_format:
            print_text(session.end)
            reply += session.end
        end_line(reply)
        shown = "" if stop.reached else shown + reply  # a stop string counts once


def score(session: Session) -> None:
    """Print the loss over every character of a text, in --dtype; for a list, each item alone."""
    options = session.options
    with error_context("--score"):
        ids = session.encode_whole(session.read(options.score))
    if len(ids) < 2:
        raise DataError(f"{options.score}: {len(ids)} known characters; at least 2 are needed")

    # windows that cover the text, each character predicted once
    split, item_format = Split(ids), session.item_format
    if item_format:
        items = item_format.items_of(options.score, [session.tokenizer.decode(ids)])
        if not items:
            raise DataError(f"{options.score}: no items; at least 1 is needed")
        split = item_format.as_split(items, session.tokenizer.encode)
    block_size = session.model.config.block_size
    batch_size = batch_size_for(block_size, len(session.tokenizer))
    windows = evaluation_windows(split, block_size, batch_size)
    losses = window_losses(session.model, windows, session.runtime)
    line = (
        f"{losses.mean:.4f} nats, {losses.mean * BITS_PER_NAT:.4f} bits per character, over "
        f"{int(losses.counts.sum()):,} predictions"
    )
    if item_format:
        per_item = losses.nats.sum() / len(items)
        line += f"; {per_item:.4f} nats per item, over {len(items):,} items"
    if split.targets is not None:
        wrong = wrong_segments(split, block_size, losses.right)
        line += f"; {1 - len(wrong) / len(items):.2%} exact match"
    print_result(line)


def write_html(session: Session, prompt: str) -> None:
    """Write a page that runs the model in a browser, and print its size."""
    options, prompt = session.options, session.tokenizer.decode(session.encode(prompt))
    size = write_page(Path(options.html), session.saved, session.model, options, prompt)
    print_result(f"{options.html}: {size / 1e6:,.1f} MB; open it in a browser")


def read_line() -> str | None:
    """Read a line of UTF-8, after a prompt if it is typed; return None at the end (Ctrl-D)."""
    if sys.stdin.isatty():
        print_text("> ")
    # a byte that is not UTF-8 becomes a character that no vocabulary has
    line = sys.stdin.buffer.readline().decode("utf-8-sig", errors="surrogateescape")
    if not line and sys.stdin.isatty():
        print_text("\n")
    return line.rstrip("\r\n") if line else None


def end_line(text: str) -> None:
    """End the line of a text that has been printed."""
    if text and not text.endswith("\n"):
        print_text("\n")


def main(command: SampleCommand) -> int:
    """Run a command; return its exit code."""
    options = command.options
    session = Session(options)
    if options.html:
        write_html(session, command.prompt)
    elif options.score:
        score(session)
    elif options.interactive:
        take_turns(session, command.prompt)
    else:
        print_samples(session, command.prompt)
    if session.item_format and session.truncated:
        print_note(
            f"{session.truncated:,} items were cut at --max_new_tokens={options.max_new_tokens:,} "
            "characters; raise it to see their ends"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(COMMAND))
