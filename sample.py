"""Generate text from a checkpoint: python sample.py --ckpt out/shakespeare --prompt "ROMEO:"

A `Session` loads the model and draws from it, for one of four functions: `print_samples`,
`take_turns`, `score` or `write_html`.

A model of a *list* was trained with data.separator, which ends each item: names, one per line. Each
of its samples is one item.
"""

import os
import sys

from configs.command import SampleCommand, parse_sample

if __name__ == "__main__":
    COMMAND = parse_sample()  # before importing torch, which takes seconds: report mistakes at once
    # model/decode.py multiplies vectors with NumPy: too little work for several threads. NumPy
    # reads this variable when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from common.console import print_error, print_result, print_stderr, print_text
from common.errors import ConfigError, DataError, UserError, counted
from configs.fields import brief, error_context, with_escapes
from configs.schema import DEFAULT_TEMPERATURE, SampleConfig
from data.batches import Split, evaluation_windows
from data.items import ItemFormat
from data.text import read_text
from data.tokenizer import UNK, CharTokenizer, UnknownCharacter
from model.decode import Decoder
from model.generate import Generation, Sampler, build_decoder
from page.export import write_page
from run import checkpoint as checkpoints
from training.device import select_runtime
from training.evaluate import BITS_PER_NAT, batch_size_for, window_losses, wrong_segments
from training.resolve import resolve

BATCH_SIZE = 64  # samples to draw at once
TRIES = 100  # samples to draw, at most, for each item that --novel should find


def main(command: SampleCommand) -> int:
    """Run a command; return its exit code."""
    session, prompt = Session(command.options), command.prompt
    # drop the newline at the end of a file or of `echo`, unless questions end in a newline
    if command.prompt_is_file and not session.answer_after.endswith("\n"):
        prompt = prompt.removesuffix("\n")

    if command.options.html:
        write_html(session, prompt)
    elif command.options.score:
        score(session)
    elif command.options.interactive:
        take_turns(session, prompt)
    else:
        print_samples(session, prompt)
    return 0


class Session:
    """A loaded model with its tokenizer, and the options to sample from it."""

    def __init__(self, options: SampleConfig):
        # the checkpoint, with its own attention layout and kernel unless the user chose others
        self.runtime = select_runtime(options.device, options.dtype)
        self.saved = checkpoints.find(Path(options.ckpt), "best", notify=print_stderr)
        config = resolve(self.saved.settings, self.runtime, self.saved.data.epochs).model
        chosen = {"attention": options.attention, "kernel": options.kernel}
        chosen = {name: value for name, value in chosen.items() if value != "saved"}
        self.model = checkpoints.build_model(self.saved, replace(config, **chosen))
        # generation casts the weights; scoring uses autocast, like training; a page is in float32
        dtype = torch.float32 if options.score or options.html else self.runtime.dtype
        self.model.to(self.runtime.device, dtype)
        self.tokenizer = CharTokenizer(self.saved.vocabulary)

        # each sample of a list is an item, and the separator ends it
        self.item_format = ItemFormat.of(self.saved.settings.data)
        self.stops, self.end, self.answer_after = options.stop, "\n", ""
        if self.item_format:
            self.end, self.answer_after = self.item_format.separator, self.item_format.answer_after
            self.stops += (self.end,)

        # temperature auto: greedy for questions, sampled otherwise
        if options.temperature == "auto":
            temperature = 0.0 if self.answer_after else DEFAULT_TEMPERATURE
            options = replace(options, temperature=temperature)
        self.options = options

    @cached_property
    def decoder(self) -> Decoder | None:
        """The fast forward pass of one text: the weights stay, so it is built once."""
        return build_decoder(self.model)

    def encode(self, text: str) -> np.ndarray:
        """Encode a text; raise ConfigError for a character that is not in the vocabulary.

        With --unknown=skip, leave out such characters instead.
        """
        # say how many are left out
        if self.options.unknown == "skip":
            known = "".join(c for c in text if c in self.tokenizer.vocabulary)
            if skipped := len(text) - len(known):
                print_stderr(f"skipped {counted(skipped, 'character')} not in the vocabulary")
            text = known

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
            question = with_escapes(self.saved.data.question)
            raise ConfigError(
                f"prompt: this model answers questions that end in {brief(self.answer_after)}; "
                f"ask one, such as {brief(question)}"
            )
        return self.encode(text)

    def read(self, path: str) -> str:
        """Read a file in the encoding of the training text."""
        return read_text(Path(path), self.saved.settings.data.encoding)

    def begin(self, sample_indices: Sequence[int], ids: np.ndarray) -> Generation:
        """Begin some samples with a prompt.

        Each sample has its own random numbers, from the seed and its index, so its text does not
        depend on the other samples.
        """
        options = self.options
        sampler = Sampler(
            options.seed,
            sample_indices,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        )
        generation = Generation(self.model, sampler, cache=options.cache, decoder=self.decoder)

        # as in training, an item begins after a separator; other text needs a first character
        start = ""
        if self.item_format:
            start = self.item_format.start
        elif len(ids) == 0:
            start = self.tokenizer.start
        ids = np.concatenate([self.tokenizer.encode(start), ids])
        generation.append(np.tile(ids, (len(sample_indices), 1)))
        return generation

    def generate(
        self, generation: Generation, stops: Sequence["StopStrings"]
    ) -> Iterator[list[str]]:
        """Draw characters until each sample has stopped; yield each sample's next text.

        That may be empty: characters that may begin a stop string are held back.
        """
        for _ in range(self.options.max_new_tokens):
            characters = self.tokenizer.decode(generation.step())  # one for each sample
            yield [stop.feed(c) for stop, c in zip(stops, characters, strict=True)]
            # stopped samples are still drawn, but not shown, until all have stopped
            if all(stop.reached for stop in stops):
                return
        # the length is reached: show the characters that were held back
        yield [stop.pending for stop in stops]


class StopStrings:
    """The stop strings of one sample: the first that the model writes ends it, and is not shown.

    The last few characters are `pending` until it is clear that they do not begin a stop string. A
    stop string may begin in the prompt.
    """

    def __init__(self, strings: Sequence[str], prompt: str):
        self.strings, self.longest = strings, max(map(len, strings), default=1)
        self.shown, self.pending, self.reached = prompt, "", False

    def feed(self, character: str) -> str:
        """Add a character; return the text that can no longer be part of a stop string."""
        if self.reached:
            return ""
        self.pending += character

        # does a stop string end here? if several do, remove the longest
        text = (self.shown + self.pending)[-self.longest :]
        found = max(filter(text.endswith, self.strings), key=len, default="")
        if found:
            self.reached = True
            length = max(0, len(self.pending) - len(found))
            shown, self.pending = self.pending[:length], ""
        else:
            # hold back as much as may be the beginning of one
            length = max(0, len(self.pending) - (self.longest - 1))
            shown, self.pending = self.pending[:length], self.pending[length:]
        self.shown = (self.shown + shown)[-self.longest :]
        return shown


# ------------------------------------------------------------------------------------ print samples


def print_samples(session: Session, prompt: str) -> None:
    """Print one sample, or several with a numbered line above each; items have no such lines."""
    options, ids = session.options, session.encode_prompt(prompt)
    block_size = session.model.config.block_size
    if len(ids) > block_size:
        print_stderr(
            f"the prompt has {len(ids):,} characters; the model sees at most the last "
            f"{block_size:,}"
        )
    if options.novel:
        print_novel(session, ids)
        return

    # print a single sample while it is drawn
    if options.sample or options.num_samples == 1:
        index = (options.sample or 1) - 1  # counted from 0
        generation, prompt = session.begin([index], ids), session.tokenizer.decode(ids)
        print_text(prompt)
        for (text,) in session.generate(generation, [StopStrings(session.stops, prompt)]):
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
    """Draw some samples; return each text, and whether a stop string ended it."""
    prompt = session.tokenizer.decode(ids)
    stops = [StopStrings(session.stops, prompt) for _ in sample_indices]
    steps = session.generate(session.begin(sample_indices, ids), stops)
    texts = map("".join, zip(*steps, strict=True))
    return [(prompt + text, stop.reached) for text, stop in zip(texts, stops, strict=True)]


def print_novel(session: Session, ids: np.ndarray) -> None:
    """Print the first samples that are whole items and not in the file of --novel, each once."""
    if not session.item_format:
        raise ConfigError("--novel is for models of a list, trained with data.separator")

    # do not print items of the file, an empty item, or an item twice
    path, count = session.options.novel, session.options.num_samples
    known = {"", *session.item_format.items_of(path, [session.read(path)])}

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


def take_turns(session: Session, prompt: str) -> None:
    """Take turns until Ctrl-D: append a typed line to the text, then let the model continue.

    After an empty line the model continues where it stopped. With a model of a list, each turn is
    an item: the prompt, the typed line and the reply.
    """
    # all turns are one long sample; with a list, each turn is the next sample
    index = (session.options.sample or 1) - 1
    if not session.item_format:
        generation = session.begin([index], session.encode(prompt))
    print_text(prompt)
    end_line(prompt)
    while (line := read_line()) is not None:
        try:
            if session.item_format:
                # if a newline ends a question, restore that of the line
                line = prompt + line + "\n" * session.answer_after.endswith("\n")
                generation = session.begin([index], session.encode_prompt(line))
                index += 1
            elif line:
                # put the typed line on a line of its own
                start = session.tokenizer.start  # a newline, if the vocabulary has one
                at_start = session.tokenizer.decode(generation.ids[0, -1:]) == start
                generation.append(session.encode(line if at_start else start + line)[None])
        except UserError as error:
            print_error(error)
            continue

        reply = ""
        for (text,) in session.generate(generation, [StopStrings(session.stops, line)]):
            print_text(text)
            reply += text
        end_line(reply)


def read_line() -> str | None:
    """Read a line of UTF-8, on a terminal after "> "; return None at the end (Ctrl-D)."""
    if sys.stdin.isatty():
        print_text("> ")
    # a byte that is not UTF-8 becomes a lone surrogate, which is never in a vocabulary
    line = sys.stdin.buffer.readline().decode("utf-8-sig", errors="surrogateescape")
    # Ctrl-D: end the line, so that the shell's prompt begins a new one
    if not line and sys.stdin.isatty():
        print_text("\n")
    return line.rstrip("\r\n") if line else None


def end_line(text: str) -> None:
    """Print a newline after a text that does not end in one."""
    if text and not text.endswith("\n"):
        print_text("\n")


# -------------------------------------------------------------------------------------- score, page


def score(session: Session) -> None:
    """Print the loss over every character of a text; the items of a list are scored one by one."""
    path, item_format, tokenizer = session.options.score, session.item_format, session.tokenizer

    # map rare characters to UNK if training did; otherwise refuse or skip unknown ones
    text, rare = session.read(path), session.saved.settings.data.min_count > 1
    with error_context("--score"):
        if rare and UNK in tokenizer.vocabulary:
            ids = tokenizer.encode(text, map_unknown=True)
        else:
            ids = session.encode(text)
    text = tokenizer.decode(ids)
    items = item_format.items_of(path, [text]) if item_format else [text]
    # each character is predicted once, except the first of a text
    if not items or (not item_format and len(text) < 2):
        raise DataError(f"{path}: nothing to predict; at least 2 known characters are needed")
    split = item_format.as_split(items, tokenizer.encode) if item_format else Split(ids)
    block_size = session.model.config.block_size
    windows = evaluation_windows(split, block_size, batch_size_for(block_size, len(tokenizer)))
    losses = window_losses(session.model, windows, session.runtime)

    # in nats, and in bits, which other reports use
    line = (
        f"{losses.mean:.4f} nats, {losses.mean * BITS_PER_NAT:.4f} bits per character, over "
        f"{counted(int(losses.counts.sum()), 'prediction')}"
    )
    if item_format:
        per_item = losses.nats.sum() / len(items)
        line += f"; {per_item:.4f} nats per item, over {counted(len(items), 'item')}"
    if split.targets is not None:
        wrong = wrong_segments(split, block_size, losses.all_correct)
        line += f"; {1 - len(wrong) / len(items):.2%} exact match"
    print_result(line)


def write_html(session: Session, prompt: str) -> None:
    """Write a page that runs the model in a browser, and print its size."""
    options = session.options
    if prompt:  # else the page begins with the example question, if there is one
        prompt = session.tokenizer.decode(session.encode_prompt(prompt))
    size = write_page(Path(options.html), session.saved, session.model, options, prompt)
    print_result(f"{options.html}: {size / 1e6:,.1f} MB; open it in a browser")


if __name__ == "__main__":
    raise SystemExit(main(COMMAND))
