"""Text from a trained model: python sample.py --ckpt out/shakespeare --prompt "ROMEO:"

`main` calls one of five functions: `print_samples`, `print_novel_items`, `converse`, `score` or
`write_html`. All of them use a `LoadedModel`.

A model of a *list* was trained on items that end in a separator: names, one per line. Each of its
samples is one item.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from common.console import print_error, print_result, print_stderr, print_text
from common.errors import ConfigError, DataError
from common.files import home_path
from common.words import escape_controls, first_few, plural, quoted, quoted_character
from configs.command import parse_sample_options
from configs.fields import format_escapes, parse_escapes
from configs.schema import DEFAULT_TEMPERATURE, SampleConfig
from data.encodings import decode_text, read_files
from page.mark import check_page


def parse_command(argv: Sequence[str] | None = None) -> tuple[SampleConfig, str]:
    """Return the checked options, and the prompt's text, before torch is imported."""
    options = parse_sample_options(argv)
    if options.html:
        check_page(home_path(options.html))
    path = options.prompt.removeprefix("FILE:")
    if options.prompt == "-" or path != options.prompt:
        return options, read_prompt(path).removesuffix("\n")  # `echo` and editors add one
    return options, parse_escapes(options.prompt)


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
from data.tokenizer import UNK, CharTokenizer, UnknownCharacter
from model.generate import Sampler, Texts
from page.export import write_page
from storage.checkpoint import build_model, load_preferred
from training.device import select_runtime
from training.evaluate import BITS_PER_NAT, batch_size_for, window_losses

SAMPLER_SETTINGS = ("temperature", "top_k", "top_p", "min_p")
BATCH_SIZE = 64  # samples to write at once
DRAWS_PER_ITEM = 100  # samples to write, at most, for each item that --novel should find


def main(options: SampleConfig, prompt: str) -> int:
    """Do what the options say; return the exit code."""
    loaded = LoadedModel(options)
    if options.interactive:
        return converse(loaded, prompt)
    if options.html:
        write_html(loaded, prompt)
    elif options.score:
        score(loaded)
    elif options.novel and loaded.item_format:
        print_novel_items(loaded, prompt)
    else:
        print_samples(loaded, prompt)
    return 0


class LoadedModel:
    """The model of a checkpoint with its tokenizer, and the options to sample from it."""

    def __init__(self, options: SampleConfig):
        self.runtime = select_runtime(options.device, options.dtype)
        self.checkpoint = load_preferred(home_path(options.ckpt), "best", notify=print_stderr)
        chosen = {"layout": options.layout, "kernel": options.kernel}
        chosen = {name: value for name, value in chosen.items() if value != "saved"}
        self.model = build_model(self.checkpoint, **chosen)
        # generation casts the weights; scoring uses autocast, as training does; a page has float32
        dtype = torch.float32 if options.score or options.html else self.runtime.dtype
        self.model.to(self.runtime.device, dtype)
        self.tokenizer = CharTokenizer(self.checkpoint.vocabulary)

        # each sample of a list is an item, and the separator ends it
        self.item_format = ItemFormat.from_settings(self.checkpoint.settings.data)
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
        encoding = self.checkpoint.settings.data.encoding
        if source == "-":
            name = "standard input"
            files, notes = read_files([(name, sys.stdin.buffer.read())], encoding)
        else:
            text = find_text((source,), encoding)
            name, files, notes = text.path, text.files, text.notes
        for note in notes:
            print_stderr(note)
        return name, files if self.item_format else end_with_newlines(files)

    def as_read(self, text: str) -> str:
        """Return a text as training reads it: UNK for characters that the vocabulary lacks."""
        vocabulary = self.tokenizer.vocabulary
        return "".join(c if c in vocabulary else UNK for c in self.tokenizer.in_known_form(text))

    def known(self, texts: Sequence[str]) -> list[str]:
        """Return texts in the Unicode form of the vocabulary.

        With --unknown=skip, leave out the characters that the vocabulary lacks.
        """
        texts = list(map(self.tokenizer.in_known_form, texts))
        if self.options.unknown != "skip":
            return texts
        kept = ["".join(c for c in text if c in self.tokenizer.vocabulary) for text in texts]
        if skipped := sum(map(len, texts)) - sum(map(len, kept)):
            print_stderr(f"skipped {plural(skipped, 'character')} not in the vocabulary")
        return kept

    def encode(self, text: str, where: str) -> np.ndarray:
        """Encode a text, with UNK for unknown characters; raise ConfigError if there is no UNK."""
        (text,) = self.known([text])
        unknown = sorted(set(text) - set(self.tokenizer.vocabulary))
        if unknown and UNK in self.tokenizer.vocabulary:
            names = first_few(map(quoted_character, unknown))
            print_stderr(f"mapped to {quoted_character(UNK)}: {names}")
        try:
            return self.tokenizer.encode(text)
        except UnknownCharacter as error:
            raise ConfigError(f"{where}: {error}; --unknown=skip leaves such out") from None

    def encode_prompt(self, text: str, where: str = "prompt") -> np.ndarray:
        """Encode a prompt or a typed line; raise ConfigError if no item could begin with it."""
        # Python reads a byte that is not UTF-8 as a surrogate
        if wrong := re.search("[\udc80-\udcff]", text):
            raise ConfigError(f"{where}: invalid byte at position {wrong.start()}; use UTF-8")

        # a model of a list has only seen single items
        if self.item_format and self.end in text:
            raise ConfigError(f"{where}: {quoted(self.end)} ends an item; give the start of one")

        # a model of answers needs a question; the end of a line may end it
        if self.answer_after not in text and self.answer_after.endswith("\n"):
            text += "\n"
        if self.answer_after not in text:
            raise ConfigError(
                f"{where}: this model answers questions that end in {quoted(self.answer_after)}; "
                f"ask one, such as {quoted(format_escapes(self.checkpoint.text.question))}"
            )

        ids, size = self.encode(text, where), self.model.config.block_size
        if len(ids) > size:
            print_stderr(f"{where}: the model sees the last {size:,} of {len(ids):,} characters")
        return ids

    def new_texts(self, sample_indices: Sequence[int], ids: np.ndarray) -> Texts:
        """Return some samples that have been begun with a prompt.

        A sample depends on the seed and its index (counted from 0), not on the other samples.
        """
        settings = {name: getattr(self.options, name) for name in SAMPLER_SETTINGS}
        sampler = Sampler(self.options.seed, sample_indices, **settings)
        texts = Texts(self.model, sampler, cache=self.options.cache)

        # as in training, an item begins after a separator; other text needs a first character
        start = "" if len(ids) else self.tokenizer.start_character
        if self.item_format:
            start = self.item_format.start_character
        ids = np.concatenate([self.tokenizer.encode(start), ids])
        texts.append(np.tile(ids, (len(sample_indices), 1)))
        return texts

    def characters(self, texts: Texts, stops: Sequence["StopStrings"]) -> Iterator[list[str]]:
        """Write until each sample has stopped; yield each sample's next characters.

        A sample has none while its last characters may begin a stop string, then several at once.
        """
        for _ in range(self.options.max_new_tokens):
            characters = self.tokenizer.decode(texts.write_one())  # one for each sample
            yield [stop.feed(c) for stop, c in zip(stops, characters, strict=True)]
            # stopped samples are still drawn, but not shown, until all have stopped
            if all(stop.ended_by for stop in stops):
                return
        # the length is reached: show the characters that were held back
        yield [stop.pending for stop in stops]

    def note_cut(self, stop: "StopStrings") -> None:
        """Say that an item has reached the length, if it has."""
        if self.item_format and not stop.ended_by:
            print_stderr(f"cut at {self.options.max_new_tokens:,} characters; --max_new_tokens")


class StopStrings:
    """The stop strings of one sample: the first that the model writes ends it, and is not shown.

    ended_by  the stop string that has ended the sample, "" until then
    ending    the part of it that the model wrote: a stop string may begin in the prompt
    pending   the last few characters, held back while they may begin a stop string
    """

    def __init__(self, strings: Sequence[str], prompt: str):
        self.strings, self.longest = strings, max(map(len, strings), default=1)
        self.shown, self.pending, self.ended_by, self.ending = prompt, "", "", ""

    def feed(self, character: str) -> str:
        """Add a character; return the text that can no longer be part of a stop string."""
        if self.ended_by:
            return ""
        self.pending += character

        # does a stop string end here? if several do, it is the longest
        text = (self.shown + self.pending)[-self.longest :]
        self.ended_by = max(filter(text.endswith, self.strings), key=len, default="")
        # show nothing of a stop string, and hold back what may be the beginning of one
        length = max(0, len(self.pending) - (len(self.ended_by) or self.longest - 1))
        shown, self.pending = self.pending[:length], self.pending[length:]
        if self.ended_by:
            self.pending, self.ending = "", self.pending
        self.shown = (self.shown + shown)[-self.longest :]
        return shown


Written = tuple[str, StopStrings]  # a sample with its prompt, and what has stopped it

# ------------------------------------------------------------------------------------ print samples


def print_samples(loaded: LoadedModel, prompt: str) -> None:
    """Print one sample, or several with a numbered line above each; items have no such lines.

    With --novel, also name the longest passage of each sample that is in the text of --novel.
    """
    options, ids = loaded.options, loaded.encode_prompt(prompt)
    name, files = loaded.read_source(options.novel) if options.novel else ("", [])
    original = loaded.as_read("".join(files))

    # print a single sample while it is written; several in batches, which is faster
    alone = options.sample or options.num_samples == 1
    if alone:
        index = (options.sample or 1) - 1  # counted from 0
        text = loaded.tokenizer.decode(ids)
        stop = StopStrings(loaded.stop_strings, text)
        print_text(text)
        for (characters,) in loaded.characters(loaded.new_texts([index], ids), [stop]):
            print_text(characters)
            text += characters
    samples = [(text, stop)] if alone else write_samples(loaded, options.num_samples, ids)

    for number, (text, stop) in enumerate(samples, 1):
        if not alone and not loaded.item_format:
            print_text(f"---------- sample {number} ----------\n")
        print_text(loaded.end if alone else text + loaded.end)
        loaded.note_cut(stop)
        if options.novel:
            passage = longest_passage(text[len(ids) :], original)  # without the prompt
            length = plural(len(passage), "character")
            print_stderr(f"longest passage that is in {name}: {length}: {quoted(passage)}")


def write_samples(loaded: LoadedModel, number: int, ids: np.ndarray) -> Iterator[Written]:
    """Write the first samples of a prompt, in batches."""
    for i in range(0, number, BATCH_SIZE):
        yield from write_batch(loaded, range(i, min(i + BATCH_SIZE, number)), ids)


def write_batch(loaded: LoadedModel, sample_indices: range, ids: np.ndarray) -> list[Written]:
    """Write some samples of a prompt."""
    prompt = loaded.tokenizer.decode(ids)
    stops = [StopStrings(loaded.stop_strings, prompt) for _ in sample_indices]
    parts = loaded.characters(loaded.new_texts(sample_indices, ids), stops)
    return [(prompt + "".join(text), stop) for *text, stop in zip(*parts, stops, strict=True)]


def longest_passage(text: str, original: str) -> str:
    """Return the longest passage of a text that is in another one; of several, the first."""
    passage = ""
    for end in range(1, len(text) + 1):
        # one character longer than the longest so far: a passage grows by one at each step
        longer = text[end - len(passage) - 1 : end]
        passage = longer if longer in original else passage
    return passage


def print_novel_items(loaded: LoadedModel, prompt: str) -> None:
    """Print the first samples that are whole items and not in the text of --novel, each once."""
    options, ids = loaded.options, loaded.encode_prompt(prompt)
    name, files = loaded.read_source(options.novel)
    known = {"", *map(loaded.as_read, loaded.item_format.items_of(name, files))}

    # a model that has memorized its list may never get there
    new, left_out, number = set(), [], options.num_samples
    for item, stop in write_samples(loaded, DRAWS_PER_ITEM * number, ids):
        if stop.ended_by != loaded.end:
            left_out.append("cut")  # by --max_new_tokens or --stop
        elif item in known or item in new:
            left_out.append("known" if item in known else "twice")
        else:
            new.add(item)
            print_text(item + loaded.end)
            if len(new) == number:
                break
    advice = "; raise --temperature for more" if len(new) < number else ""
    print_stderr(
        f"{plural(len(new), 'item')}; left out: {left_out.count('known'):,} that are in {name}, "
        f"{left_out.count('twice'):,} drawn twice, {left_out.count('cut'):,} cut{advice}"
    )


# ------------------------------------------------------------------------------------- conversation


def converse(loaded: LoadedModel, prompt: str) -> int:
    """Hold a conversation until Ctrl-D; return the exit code: 2 if a line was refused, otherwise 0.

    A typed line begins a new line of the text, and the model continues it; after an empty line the
    model goes on. A string of --stop that ends a reply, such as `Ann:`, is the prompt to type at.
    With a model of a list, each turn is an item: the prompt, the typed line and the reply.
    """
    typing, on_screen = sys.stdin.isatty(), sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdin.reconfigure(encoding=None if typing else "utf-8-sig", errors="surrogateescape")
    if typing:
        with suppress(ImportError):  # Windows edits lines without it
            import readline  # noqa: F401 - `input` then has the arrow keys
        print_stderr("the model continues what you type; an empty line lets it go on; Ctrl-D ends")

    # a text is one long sample; of a list, each item is the next sample
    tokenizer, is_list = loaded.tokenizer, bool(loaded.item_format)
    index, exit_code = (loaded.options.sample or 1) - 1, 0
    said = ending = ""  # what was written last; the end of a stop string, at which the user types
    if not is_list:
        ids, prompt = loaded.encode_prompt(prompt), ""
        texts, said = loaded.new_texts([index], ids), tokenizer.decode(ids)
        # "\n": a text begins at the start of a line
        if f"\n{said}".endswith(loaded.stop_strings):
            said, newline, ending = said.rpartition("\n")
            said += newline
        print_text(said if ending or said.endswith("\n") or not said else f"{said}\n")

    for number in count(1):
        try:
            if not on_screen:  # a pipe, or a terminal and `| tee log`
                print_text(ending)
                print("> " if typing and not ending else "", end="", file=sys.stderr, flush=True)
            line = input((escape_controls(ending) or "> ") if on_screen else "")
        except EOFError:
            print_text("\n" if typing or ending else "")
            return exit_code

        try:
            ids = loaded.encode_prompt(prompt + line, f"line {number}")
        except ConfigError as error:
            print_error(error)
            exit_code = 2
            print_text("" if on_screen else "\n")  # answers stay beside their questions
            continue

        if is_list:
            texts, said, index = loaded.new_texts([index], ids), "", index + 1
        else:
            at_start = ending or tokenizer.decode(texts.ids[0, -1:]) == "\n"
            if line and not at_start and "\n" in tokenizer.vocabulary:
                ids = np.concatenate([tokenizer.encode("\n"), ids])
            texts.append(ids[None])

        # after an empty line, a stop string may begin in the reply before
        before = tokenizer.decode(ids) or said * (not ending)
        stop, said, ending = StopStrings(loaded.stop_strings, before), "", ""
        for (characters,) in loaded.characters(texts, [stop]):
            # on the screen, Enter has ended the typed line already
            print_text(characters.removeprefix("\n") if on_screen and not said else characters)
            said += characters
        if not is_list:  # what ends an item is not shown
            before, newline, ending = stop.ending.rpartition("\n")
            print_text(before + newline)
            said += before + newline
        print_text("" if ending or said.endswith("\n") else "\n")
        loaded.note_cut(stop)


# -------------------------------------------------------------------------------------- score, page


def score(loaded: LoadedModel) -> None:
    """Print the mean loss over every character of a text; a list is scored item by item."""
    item_format, tokenizer = loaded.item_format, loaded.tokenizer
    name, files = loaded.read_source(loaded.options.score)
    texts = loaded.known(item_format.items_of(name, files) if item_format else ["".join(files)])
    texts = [text for text in texts if text.strip() or not item_format]
    # each character is predicted once, except the first of a text
    if not texts or (not item_format and len(texts[0]) < 2):
        raise DataError(f"{name}: nothing to predict; at least 2 known characters are needed")
    encode = partial(loaded.encode, where="--score")
    split = item_format.encode_items(texts, encode) if item_format else Split(encode(texts[0]))
    block_size = loaded.model.config.block_size
    windows = evaluation_windows(split, block_size, batch_size_for(block_size, len(tokenizer)))
    losses = window_losses(loaded.model, windows, loaded.runtime)

    # in nats, and in bits, which other reports use
    line = (
        f"{losses.mean:.4f} nats, {losses.mean * BITS_PER_NAT:.4f} bits per character, over "
        f"{plural(int(losses.counts.sum()), 'prediction')}"
    )
    if item_format:
        per_item = losses.sums.sum() / len(texts)
        line += f"; {per_item:.4f} nats per item, over {plural(len(texts), 'item')}"
    if split.targets is not None:
        line += f"; {1 - len(losses.wrong_segments) / len(texts):.2%} exact match"
    print_result(line)


def write_html(loaded: LoadedModel, prompt: str) -> None:
    """Write a page that runs the model in a browser, and print its size."""
    options = loaded.options
    if prompt:  # else the page begins with the example question, if there is one
        prompt = loaded.tokenizer.decode(loaded.encode_prompt(prompt))
    size = write_page(home_path(options.html), loaded.checkpoint, loaded.model, options, prompt)
    print_result(f"{options.html}: {size / 1e6:,.1f} MB; open it in a browser")


if __name__ == "__main__":
    raise SystemExit(main(*COMMAND))
