"""Generate text from a checkpoint: python sample.py --ckpt out/shakespeare --prompt "ROMEO:"

A `Session` loads the model and draws from it, for one of four functions: `print_samples`,
`take_turns`, `score` or `write_html`.

A model of a *list* was trained with data.separator, which ends each item: names, one per line. Each
of its samples is one item.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from common.console import escape, print_error, print_result, print_stderr, print_text
from common.errors import ConfigError, DataError, UserError, counted, first_few
from common.files import home_path
from configs.command import parse_sample_options
from configs.fields import INVALID_TEXT, brief, error_context, unescape, with_escapes
from configs.schema import DEFAULT_TEMPERATURE, SampleConfig
from data.encodings import ENCODING_OF_BOM, decode_text, read_files
from page.mark import check_page


def is_from_file(prompt: str) -> bool:
    """Return whether a prompt, `-` or `FILE:PATH`, is in standard input or a file."""
    return prompt == "-" or prompt.startswith("FILE:")


def parse_command(argv: Sequence[str] | None = None) -> tuple[SampleConfig, str]:
    """Return the checked options, and the prompt's text, before torch is imported."""
    options = parse_sample_options(argv)
    if options.html:
        check_page(home_path(options.html))
    if is_from_file(options.prompt):
        return options, read_prompt(options.prompt.removeprefix("FILE:"))
    return options, unescape(options.prompt)


def read_prompt(path: str) -> str:
    """Return the text of a file, or of standard input if `path` is "-"."""
    name = "standard input" if path == "-" else path
    try:
        content = sys.stdin.buffer.read() if path == "-" else home_path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}; name a text file") from error
    return decode_text(content, name, "utf-8")


if __name__ == "__main__":
    COMMAND = parse_command()  # before importing torch, which takes seconds

import numpy as np
import torch

from data.batches import Split, evaluation_windows
from data.corpus import end_with_newlines
from data.items import ItemFormat
from data.text import find_text
from data.tokenizer import UNK, CharTokenizer, UnknownCharacter, describe
from model.generate import Sampler, Texts
from page.export import write_page
from storage.checkpoint import build_model, load_preferred
from training.device import select_runtime
from training.evaluate import BITS_PER_NAT, batch_size_for, window_losses

FILTERS = ("temperature", "top_k", "top_p", "min_p")  # what a Sampler does to the probabilities
BATCH_SIZE = 64  # samples to draw at once
TRIES = 100  # samples to draw, at most, for each item that --novel should find


def main(options: SampleConfig, prompt: str) -> int:
    """Do what the options say; return the exit code."""
    session = Session(options)
    # drop the newline at the end of a file or of `echo`, unless questions end in a newline
    if is_from_file(options.prompt) and not session.answer_after.endswith("\n"):
        prompt = prompt.removesuffix("\n")

    if options.html:
        write_html(session, prompt)
    elif options.score:
        score(session)
    elif options.interactive:
        return take_turns(session, prompt)
    else:
        print_samples(session, prompt)
    return 0


class Session:
    """A loaded model with its tokenizer, and the options to sample from it."""

    def __init__(self, options: SampleConfig):
        # the checkpoint, with its own attention layout and kernel unless the user chose others
        self.runtime = select_runtime(options.device, options.dtype)
        self.saved = load_preferred(home_path(options.ckpt), "best", notify=print_stderr)
        chosen = {"layout": options.layout, "kernel": options.kernel}
        chosen = {name: value for name, value in chosen.items() if value != "saved"}
        self.model = build_model(self.saved, **chosen)
        # generation casts the weights; scoring uses autocast, like training; a page is in float32
        dtype = torch.float32 if options.score or options.html else self.runtime.dtype
        self.model.to(self.runtime.device, dtype)
        self.tokenizer = CharTokenizer(self.saved.vocabulary)

        # each sample of a list is an item, and the separator ends it
        self.item_format = ItemFormat.from_settings(self.saved.settings.data)
        self.stop_strings, self.end, self.answer_after = options.stop, "\n", ""
        if self.item_format:
            self.end, self.answer_after = self.item_format.separator, self.item_format.answer_after
            self.stop_strings += (self.end,)

        # temperature auto: greedy for questions, sampled otherwise
        if options.temperature == "auto":
            options = replace(options, temperature=0 if self.answer_after else DEFAULT_TEMPERATURE)
        self.options = options

    def read_source(self, source: str) -> tuple[str, list[str]]:
        """Return the name of a text, and the characters of its files, as training reads them.

        `source` is a file, folder or pattern, as in --sources, or "-" for standard input.
        """
        encoding = self.saved.settings.data.encoding
        if source == "-":
            name = "standard input"
            files, notes = read_files([(name, sys.stdin.buffer.read())], encoding)
        else:
            text = find_text((source,), encoding)
            name, files, notes = text.path, text.files, text.notes
        print_stderr(*notes)
        return name, files if self.item_format else end_with_newlines(files)

    def known(self, texts: Sequence[str]) -> list[str]:
        """Return texts as they are, or, with --unknown=skip, without unknown characters."""
        if self.options.unknown != "skip":
            return list(texts)
        known = ["".join(c for c in text if c in self.tokenizer.vocabulary) for text in texts]
        if skipped := sum(map(len, texts)) - sum(map(len, known)):
            print_stderr(f"skipped {counted(skipped, 'character')} not in the vocabulary")
        return known

    def encode(self, text: str) -> np.ndarray:
        """Encode a text, of which --unknown=skip leaves out the unknown characters.

        Otherwise they are mapped to UNK, or, if the vocabulary lacks it, raise ConfigError.
        """
        (text,) = self.known([text])
        unknown = sorted(set(text) - set(self.tokenizer.vocabulary))
        if unknown and UNK in self.tokenizer.vocabulary:
            print_stderr(f"mapped to {describe(UNK)}: {first_few(map(describe, unknown))}")
        try:
            return self.tokenizer.encode(text)
        except UnknownCharacter as error:
            raise ConfigError(f"{error}; --unknown=skip leaves such characters out") from None

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode a prompt; raise ConfigError if no item of the list could begin with it."""
        # a model of a list has only seen single items
        if self.item_format and self.item_format.separator in text:
            raise ConfigError(
                f"prompt: {brief(self.item_format.separator)} ends an item, and the model has "
                "never seen two; give the beginning of one item"
            )

        # a model of answers needs a question
        if self.answer_after not in text:
            question = with_escapes(self.saved.text.question)
            raise ConfigError(
                f"prompt: this model answers questions that end in {brief(self.answer_after)}; "
                f"ask one, such as {brief(question)}"
            )

        ids, block_size = self.encode(text), self.model.config.block_size
        if len(ids) > block_size:
            print_stderr(
                f"the prompt has {len(ids):,} characters; the model sees at most the last "
                f"{block_size:,}"
            )
        return ids

    def begin(self, sample_indices: Sequence[int], ids: np.ndarray) -> Texts:
        """Begin some samples with a prompt.

        Each sample has its own random numbers, from the seed and its index, so its text does not
        depend on the other samples.
        """
        options = self.options
        filters = {name: getattr(options, name) for name in FILTERS}
        sampler = Sampler(options.seed, sample_indices, **filters)
        texts = Texts(self.model, sampler, cache=options.cache)

        # as in training, an item begins after a separator; other text needs a first character
        start = ""
        if self.item_format:
            start = self.item_format.start_character
        elif len(ids) == 0:
            start = self.tokenizer.start_character
        ids = np.concatenate([self.tokenizer.encode(start), ids])
        texts.append(np.tile(ids, (len(sample_indices), 1)))
        return texts

    def generate(self, texts: Texts, stops: Sequence["StopStrings"]) -> Iterator[list[str]]:
        """Draw characters until each sample has stopped; yield each sample's next text.

        That may be empty: characters that may begin a stop string are held back.
        """
        for _ in range(self.options.max_new_tokens):
            characters = self.tokenizer.decode(texts.write_one())  # one for each sample
            yield [stop.feed(c) for stop, c in zip(stops, characters, strict=True)]
            # stopped samples are still drawn, but not shown, until all have stopped
            if all(stop.found for stop in stops):
                return
        # the length is reached: show the characters that were held back
        yield [stop.pending for stop in stops]


class StopStrings:
    """The stop strings of one sample: the first that the model writes ends it, and is not shown.

    It may begin in the prompt. It is `found` then, and `ending` is the part that the model wrote.
    The last few characters are `pending` until it is clear that they do not begin a stop string.
    """

    def __init__(self, strings: Sequence[str], prompt: str):
        self.strings, self.longest = strings, max(map(len, strings), default=1)
        self.shown, self.pending, self.found, self.ending = prompt, "", "", ""

    def feed(self, character: str) -> str:
        """Add a character; return the text that can no longer be part of a stop string."""
        if self.found:
            return ""
        self.pending += character

        # does a stop string end here? if several do, it is the longest
        text = (self.shown + self.pending)[-self.longest :]
        self.found = max(filter(text.endswith, self.strings), key=len, default="")
        # of a stop string show nothing; otherwise hold back what may be the beginning of one
        length = max(0, len(self.pending) - (len(self.found) or self.longest - 1))
        shown, self.pending = self.pending[:length], self.pending[length:]
        if self.found:
            self.pending, self.ending = "", self.pending
        self.shown = (self.shown + shown)[-self.longest :]
        return shown


# ------------------------------------------------------------------------------------ print samples


def print_samples(session: Session, prompt: str) -> None:
    """Print one sample, or several with a numbered line above each; items have no such lines."""
    options, ids = session.options, session.encode_prompt(prompt)
    if options.novel:
        print_novel(session, ids)
        return

    # print a single sample while it is drawn
    if options.sample or options.num_samples == 1:
        index = (options.sample or 1) - 1  # counted from 0
        texts, prompt = session.begin([index], ids), session.tokenizer.decode(ids)
        print_text(prompt)
        for (text,) in session.generate(texts, [StopStrings(session.stop_strings, prompt)]):
            print_text(text)
        print_text(session.end)
        return

    # draw several in batches, which is faster
    for indices in index_batches(options.num_samples):
        for index, (text, _) in zip(indices, draw(session, indices, ids), strict=True):
            if not session.item_format:
                print_text(f"---------- sample {index + 1} ----------\n")
            print_text(text + session.end)


def index_batches(count: int) -> Iterator[range]:
    """Yield the sample indices 0 ... count - 1, BATCH_SIZE at a time."""
    return (range(i, min(i + BATCH_SIZE, count)) for i in range(0, count, BATCH_SIZE))


def draw(session: Session, sample_indices: range, ids: np.ndarray) -> list[tuple[str, bool]]:
    """Draw some samples; return each text, and whether it is a whole item."""
    prompt = session.tokenizer.decode(ids)
    stops = [StopStrings(session.stop_strings, prompt) for _ in sample_indices]
    steps = session.generate(session.begin(sample_indices, ids), stops)
    texts = map("".join, zip(*steps, strict=True))
    whole = (stop.found == session.end for stop in stops)  # not cut by a string of --stop
    return [(prompt + text, is_whole) for text, is_whole in zip(texts, whole, strict=True)]


def print_novel(session: Session, ids: np.ndarray) -> None:
    """Print the first samples that are whole items and not in the file of --novel, each once."""
    if not session.item_format:
        raise ConfigError("--novel is for models of a list, trained with data.separator")

    # do not print items of the file, an empty item, or an item twice
    count = session.options.num_samples
    items = session.item_format.items_of(*session.read_source(session.options.novel))
    # rare characters are UNK, as in training
    vocabulary = session.tokenizer.vocabulary
    known = {"", *("".join(c if c in vocabulary else UNK for c in item) for item in items)}

    # draw until there are enough; a model that has memorized its list may never get there
    found = 0
    for indices in index_batches(TRIES * count):
        for text, whole in draw(session, indices, ids):
            if whole and found < count and text not in known:
                print_text(text + session.end)
                known.add(text)
                found += 1
        if found == count:
            return
    print_stderr(
        f"--novel: found only {counted(found, 'new item')} of {count:,} in {TRIES * count:,} "
        "samples; raise --temperature"
    )


# --------------------------------------------------------------------------------------- take turns


def take_turns(session: Session, prompt: str) -> int:
    """Take turns until Ctrl-D; return the exit code: 2 if a line was refused, otherwise 0."""
    on_terminal, exit_code = prepare_input(), 0
    conversation = Conversation(session, prompt)
    print_text(conversation.text)
    if conversation.text and not conversation.continues:
        end_line(conversation.text)
    while True:
        unfinished = conversation.text.rpartition("\n")[2] if conversation.continues else ""
        try:
            line = type_after(unfinished) if on_terminal else input()
        except EOFError:
            if on_terminal or unfinished:
                print_text("\n")
            return exit_code
        except UnicodeError as error:  # UTF-16 that ends within a character
            raise DataError(f"standard input: {error}; convert it to UTF-8") from None

        try:
            conversation.add(line)
        except UserError as error:
            print_error(error)
            exit_code = 2
            if not sys.stdout.isatty():
                print_text("\n")  # so that answers stay beside their questions
            continue

        for text in conversation.reply():
            # on the screen, Enter has ended the typed line already
            is_first = not conversation.text
            print_text(text.removeprefix("\n") if on_terminal and is_first else text)
        if not conversation.continues:
            end_line(conversation.text)


class Conversation:
    """A text that somebody and the model write in turn.

    A typed line begins a new line of the text, and the model continues it; after an empty line the
    model goes on. If the text ends in a string of --stop, such as `Ann:`, the typed line continues
    that. With a model of a list, each turn is an item: the prompt, the typed line and the reply.

    text       the last reply, so far; before the first one, the prompt
    continues  whether the next line continues that text
    """

    def __init__(self, session: Session, prompt: str):
        self.session, self.prompt, self.text = session, prompt, prompt
        # all turns are one long sample; with a list, each item is the next sample
        self.sample_index = (session.options.sample or 1) - 1
        self.continues = False
        if not session.item_format:
            ids = session.encode_prompt(prompt)
            self.texts = session.begin([self.sample_index], ids)
            self.text = session.tokenizer.decode(ids)
            # "\n": a text begins at the start of a line
            self.continues = f"\n{self.text}".endswith(session.options.stop)

    def add(self, line: str) -> None:
        """Add a typed line; raise ConfigError, and add nothing, if the model cannot read it."""
        session = self.session
        if INVALID_TEXT.search(line):
            raise ConfigError(f"{brief(line)}: not UTF-8; type it again")
        if session.item_format and not self.continues:
            line = self.prompt + line
            if session.answer_after.endswith("\n"):  # Enter ends the question
                line += "\n"
            self.texts = session.begin([self.sample_index], session.encode_prompt(line))
            self.sample_index += 1
        elif line:
            ids = session.encode(line)
            if not self.continues and "\n" in session.tokenizer.vocabulary:
                newline = session.tokenizer.encode("\n")
                if self.texts.ids[0, -1] != newline:
                    self.texts.append(newline[None])
            self.texts.append(ids[None])
        elif not self.continues:
            line = self.text  # the model goes on with its reply, where a stop string may begin
        self.stop = StopStrings(session.stop_strings, line)

    def reply(self) -> Iterator[str]:
        """Write a reply; yield its parts."""
        self.text = ""
        for (part,) in self.session.generate(self.texts, [self.stop]):
            yield part
            self.text += part
        # what ends an item is not shown, and no line continues it
        found = self.stop.found
        ended = self.session.item_format and found.endswith(self.session.end)
        self.continues = bool(found) and not ended
        if self.continues:
            yield self.stop.ending
            self.text += self.stop.ending


def prepare_input() -> bool:
    """Prepare `input` to read lines; return whether somebody types them on a terminal.

    A file or pipe is UTF-8, or has a byte order mark. A wrong byte becomes a lone surrogate.
    """
    on_terminal, encoding = sys.stdin.isatty() and sys.stdout.isatty(), None
    if on_terminal:
        with suppress(ImportError):  # Windows edits lines without it
            import readline  # noqa: F401 - `input` then has the arrow keys
        print_stderr("the model continues what you type; an empty line lets it go on; Ctrl-D ends")
    else:
        start = sys.stdin.buffer.peek(4)
        mark = next(filter(start.startswith, ENCODING_OF_BOM), b"")
        encoding = ENCODING_OF_BOM.get(mark, "utf-8")
    sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape", newline=None)
    return on_terminal


def type_after(unfinished: str) -> str:
    """Read a typed line that continues an unfinished one, if any; raise EOFError at Ctrl-D."""
    # `input` prints the last row of it again, and can redraw it while the line is edited
    width = shutil.get_terminal_size().columns
    row = escape(unfinished)
    row = row[(len(row) - 1) // width * width :]
    if row:
        print("\r", end="")
    return input(row or "> ")


def end_line(text: str) -> None:
    """Print a newline after a text that does not end in one."""
    if not text.endswith("\n"):
        print_text("\n")


# -------------------------------------------------------------------------------------- score, page


def score(session: Session) -> None:
    """Print the loss over every character of a text; the items of a list are scored one by one."""
    item_format, tokenizer = session.item_format, session.tokenizer
    name, texts = session.read_source(session.options.score)
    texts = item_format.items_of(name, texts) if item_format else ["".join(texts)]
    texts = [text for text in session.known(texts) if text.strip() or not item_format]
    # each character is predicted once, except the first of a text
    if not texts or (not item_format and len(texts[0]) < 2):
        raise DataError(f"{name}: nothing to predict; at least 2 known characters are needed")
    with error_context("--score"):
        if item_format:
            split = item_format.encode_items(texts, session.encode)
        else:
            split = Split(session.encode(texts[0]))
    block_size = session.model.config.block_size
    windows = evaluation_windows(split, block_size, batch_size_for(block_size, len(tokenizer)))
    losses = window_losses(session.model, windows, session.runtime)

    # in nats, and in bits, which other reports use
    line = (
        f"{losses.mean:.4f} nats, {losses.mean * BITS_PER_NAT:.4f} bits per character, over "
        f"{counted(int(losses.counts.sum()), 'prediction')}"
    )
    if item_format:
        per_item = losses.nats.sum() / len(texts)
        line += f"; {per_item:.4f} nats per item, over {counted(len(texts), 'item')}"
    if split.targets is not None:
        line += f"; {1 - len(losses.wrong) / len(texts):.2%} exact match"
    print_result(line)


def write_html(session: Session, prompt: str) -> None:
    """Write a page that runs the model in a browser, and print its size."""
    options = session.options
    if prompt:  # else the page begins with the example question, if there is one
        prompt = session.tokenizer.decode(session.encode_prompt(prompt))
    size = write_page(home_path(options.html), session.saved, session.model, options, prompt)
    print_result(f"{options.html}: {size / 1e6:,.1f} MB; open it in a browser")


if __name__ == "__main__":
    raise SystemExit(main(*COMMAND))
