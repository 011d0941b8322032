"""Generate text from a checkpoint: python sample.py --ckpt out/shakespeare --prompt "ROMEO:" """

import sys

from common.signals import exit_at_once, handle_signals

if __name__ == "__main__":
    handle_signals(exit_at_once)  # before the imports below, which take a moment

import dataclasses
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.console import (
    print_error,
    print_note,
    print_result,
    print_text,
    run_script,
    stdout_is_closed,
)
from common.errors import ConfigError, DataError, ResourceError, UserError
from common.files import check_path_spelling, read_regular
from common.packages import check_address_space, check_packages
from configs.cli import load_sample, sample_help
from configs.fields import brief, error_context
from configs.schema import SampleConfig

if TYPE_CHECKING:
    import numpy as np

    from data.text_files import File
    from model.generate import Generation
    from model.ngram_model import NgramModel

# The products for a single token are too small to multithread. NumPy reads this at its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
MAX_BATCH = 64  # samples
MAX_BUFFERED = 2**24  # characters of a batch; longer samples are drawn and printed one at a time
MAX_FILE = 2**28  # bytes
MAX_NGRAM_TEXT = 10_000_000  # characters; counting more would take too long and too much memory
LEAK_LENGTH = 200  # characters in a row that two independent texts do not share
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print_text(sample_help())
        return 0
    check_packages()
    options = load_sample(argv)
    options = dataclasses.replace(options, stop=tuple(map(unescape, options.stop)))
    if stdout_is_closed():
        raise ResourceError("standard output is closed; redirect it to a file or a program")
    check_address_space()
    for ckpt in options.ckpt:
        check_path_spelling(ckpt)
    if options.html:
        from page.export import check_target

        check_target(Path(options.html), options.overwrite)
    text = read_text(options.score, DataError) if options.score else read_prompt(options.prompt)
    ngram_file = None
    if options.ngrams:
        from data.text_files import find_file

        ngram_file = find_file(Path(options.ngrams))
    session = Session(options, ngram_file)
    if options.html:
        session.write_page(text)
    elif options.score:
        session.score(text)
    elif options.interactive:
        interact(session, text)
    else:
        print_samples(session, text)
    if options.stats:
        rate = session.drawn / max(session.seconds, 1e-9)
        print_note(f"{session.drawn:,} characters, {rate:,.0f} a second")
    return 0


def print_samples(session: "Session", prompt: str) -> None:
    """Print one sample while it is drawn; draw several in batches, and print complete batches."""
    options, ids = session.options, session.encode(prompt)
    block_size = session.model.config.block_size
    if len(ids) > block_size:
        print_note(
            f"the prompt has {len(ids):,} characters; the model sees at most the last "
            f"{block_size:,}"
        )
    prompt = session.tokenizer.decode(ids)
    batch = min(MAX_BATCH, max(1, MAX_BUFFERED // max(1, options.max_new_tokens)))
    start, end = 0, options.num_samples
    if options.sample:
        start, end = options.sample - 1, options.sample
    for first in range(start, end, batch):
        samples = range(first, min(first + batch, end))
        stops = [StopStrings(options.stop, prompt) for _ in samples]
        steps = session.generate(session.begin(samples, ids), stops)
        if len(samples) == 1:
            columns = [(piece for (piece,) in steps)]
        else:
            columns = zip(*steps, strict=True)
        for i, pieces in zip(samples, columns, strict=True):
            heading = f"---------- sample {i + 1} ----------\n" * (options.num_samples > 1)
            print_text(heading + prompt)
            for piece in pieces:
                print_text(piece)
            print_text("\n")


def interact(session: "Session", prompt: str) -> None:
    """Take turns until Ctrl-D: append a typed line to the text, then let the model continue.

    After an empty line the model continues from where it stopped. A stop string ends the turn; it
    stays in the context but is not printed.
    """
    ids, samples = session.encode(prompt), [(session.options.sample or 1) - 1]
    generation = session.begin(samples, ids) if len(ids) else None
    shown = session.tokenizer.decode(ids)  # may contain the start of a stop string
    print_text(shown)
    end_line(shown)
    while (line := read_line()) is not None:
        try:
            ids = session.encode(line)
        except UserError as error:
            print_error(error)
            continue
        if generation is None:
            generation = session.begin(samples, ids)
            shown = session.tokenizer.decode(ids)
        else:
            shown += session.append_line(generation, ids)
        stop, reply = StopStrings(session.options.stop, shown), ""
        for (piece,) in session.generate(generation, [stop]):
            print_text(piece)
            reply += piece
        end_line(reply)
        shown = "" if stop.reached else shown + reply


class Session:
    """The model and tokenizer, the sampling options, and the characters drawn.

    Several checkpoints are one mixture, and so is a checkpoint with the n-grams of `ngram_file`.
    """

    def __init__(self, options: SampleConfig, ngram_file: "File | None" = None):
        from checkpointing import checkpoint as checkpoints
        from data.tokenizer import CharTokenizer, UnknownCharacter
        from model.mixture import Mixture
        from training import runtime

        self.options = options
        self.runtime = runtime.select_runtime(options.device, options.dtype)
        gpts = []
        for ckpt in options.ckpt:
            saved, note = checkpoints.find(Path(ckpt), "best")
            if note:
                print_note(note)
            if gpts:
                checkpoints.check_can_average(saved, self.saved)
            chosen = {"attention": options.attention, "kernel": options.kernel}
            chosen = {name: value for name, value in chosen.items() if value != "saved"}
            config = dataclasses.replace(saved.config.model, **chosen)
            gpts.append(checkpoints.build_model(saved, config).to(self.runtime.device))
            self.saved = dataclasses.replace(saved, tensors={})  # frees the optimizer state
        self.tokenizer = CharTokenizer(self.saved.vocabulary)
        self.model, self.ngram_model = gpts[0], None
        if ngram_file:
            self.ngram_model = self.count_ngrams(ngram_file)
        if len(gpts) > 1 or ngram_file:
            self.model = Mixture(gpts, self.ngram_model, options.ngram_weight)
        self.drawn, self.seconds = 0, 0.0  # number of characters drawn, and the time it took
        for stop in options.stop:
            try:
                self.tokenizer.encode(stop)
            except UnknownCharacter as error:
                raise ConfigError(f"--stop {brief(stop)} can never appear: {error}") from None

    def encode(self, text: str) -> "np.ndarray":
        """Encode a text; with --unknown=skip, without its unknown characters.

        Otherwise an unknown character raises ConfigError.
        """
        from data.tokenizer import UnknownCharacter

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

    def count_ngrams(self, file: "File") -> "NgramModel":
        """Count the n-grams of a file, which is read as the text of the checkpoint was."""
        from data.text_files import read_text
        from data.tokenizer import UNK
        from model.mixture import NGRAM_ORDER
        from model.ngram_model import NgramModel

        data = self.saved.config.data
        text = read_text(file, data.encoding, data.newlines, MAX_NGRAM_TEXT)
        if data.min_count > 1 and UNK in self.tokenizer.vocabulary:
            ids = self.tokenizer.encode(text, map_unknown=True)
        else:
            with error_context("--ngrams"):
                ids = self.encode(text)
        if not len(ids):
            raise DataError(f"--ngrams: {file.path}: no known characters; use another text")
        return NgramModel(ids, NGRAM_ORDER, len(self.tokenizer))

    def begin(self, samples: Sequence[int], ids: "np.ndarray") -> "Generation":
        """Start these samples with the prompt, or with a start character if the prompt is empty."""
        import numpy as np
        import torch

        from model.generate import Generation, Sampler

        options = self.options
        sampler = Sampler(
            options.seed,
            samples,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        )
        generation = Generation(
            self.model.to(self.runtime.dtype),
            sampler,
            cache=options.cache,
            window=options.window,
            notify=print_note,
        )
        if generation.decoder:
            torch.set_num_threads(generation.decoder.threads)
        if not len(ids):
            ids = self.tokenizer.encode(self.tokenizer.start)
        generation.append(np.tile(ids, (len(samples), 1)))
        return generation

    def append_line(self, generation: "Generation", ids: "np.ndarray") -> str:
        """Append a typed line to the text, on a line of its own; return what was appended."""
        import numpy as np

        at_start = self.tokenizer.decode(generation.ids[0, -1:]) == "\n"
        if len(ids) and not at_start and "\n" in self.tokenizer.vocabulary:
            ids = np.concatenate([self.tokenizer.encode("\n"), ids])
        generation.append(ids[None])
        return self.tokenizer.decode(ids)

    def generate(
        self, generation: "Generation", stops: Sequence["StopStrings"]
    ) -> Iterator[list[str]]:
        """Draw characters until all samples have ended; yield what each adds to the output."""
        for _ in range(self.options.max_new_tokens):
            began = time.perf_counter()
            characters = self.tokenizer.decode(generation.step())
            self.seconds += time.perf_counter() - began
            self.drawn += sum(not stop.reached for stop in stops)
            yield [stop.feed(each) for stop, each in zip(stops, characters, strict=True)]
            if all(stop.reached for stop in stops):
                return
        yield [stop.pending for stop in stops]

    def write_page(self, prompt: str) -> None:
        """Write a page that runs the model in a browser, and print its size."""
        from page.export import write_page

        options, prompt = self.options, self.tokenizer.decode(self.encode(prompt))
        size = write_page(Path(options.html), self.saved, self.model, options, prompt)
        half = "; --html-dtype=float16 halves it" * (options.html_dtype == "float32")
        print_result(f"{options.html}: {size / 1e6:,.1f} MB{half}; open it in a browser")

    def score(self, text: str) -> None:
        """Print the exact loss of a text, under autocast to --dtype."""
        from data.batches import Split, evaluation_windows
        from training.evaluate import BITS_PER_NAT, batch_size_for, exact_loss

        ids = self.encode(text)
        if len(ids) < 2:
            raise DataError(
                f"{self.options.score}: {len(ids)} known characters; at least 2 are needed"
            )
        if self.ngram_model and self.ngram_model.has_read(ids, LEAK_LENGTH):
            print_note(
                f"{self.options.score} has {LEAK_LENGTH} characters in a row that are in "
                f"--ngrams {self.options.ngrams} too, so this loss is too low"
            )
        split = Split(ids, ((0, len(ids)),))
        block_size = self.model.config.block_size
        batch_size = batch_size_for(block_size, len(self.tokenizer))
        windows = evaluation_windows(split, block_size, batch_size)
        nats = exact_loss(self.model, windows, self.runtime)
        print_result(
            f"{nats:.4f} nats, {nats * BITS_PER_NAT:.4f} bits per character, "
            f"over {len(ids) - 1:,} predictions"
        )


class StopStrings:
    """Detects the stop string that ends a sample, even if it begins in text already shown.

    Text that may be the start of a stop string is buffered in `pending`.
    """

    def __init__(self, stops: Sequence[str], shown: str):
        self.stops, self.longest = stops, max(map(len, stops), default=0)
        self.tail = shown[max(0, len(shown) - self.longest) :]
        self.pending, self.reached = "", False

    def feed(self, character: str) -> str:
        """Add a character; return the text that is now certain not to belong to a stop string."""
        if not self.stops or self.reached:
            return "" if self.reached else character
        self.tail = (self.tail + character)[-self.longest :]
        self.pending += character
        stop = max(filter(self.tail.endswith, self.stops), key=len, default="")
        if stop:
            self.reached, certain = True, len(self.pending) - len(stop)
        else:
            certain = len(self.pending) - len(self._possible_start())
        certain = max(certain, 0)
        output, self.pending = self.pending[:certain], "" if stop else self.pending[certain:]
        return output

    def _possible_start(self) -> str:
        """Return the longest suffix of the text that is a prefix of a stop string."""
        for n in range(len(self.tail), 0, -1):
            if any(stop.startswith(self.tail[-n:]) for stop in self.stops):
                return self.tail[-n:]
        return ""


def read_prompt(prompt: str) -> str:
    """Return the text of --prompt: the option itself, the content of a file, or standard input."""
    if prompt == "-":
        return decode(sys.stdin.buffer.read(), "standard input", ConfigError)
    if prompt.startswith("FILE:"):
        return read_text(prompt.removeprefix("FILE:"), ConfigError)
    return unescape(prompt)


def read_text(name: str, error_type: type[UserError]) -> str:
    """Read a text file; raise `error_type` if it cannot be read."""
    try:
        content = read_regular(name, MAX_FILE)
    except OSError as error:
        raise error_type(f"{name}: {error.strerror}; name a text file that can be read") from None
    return decode(content, name, error_type)


def decode(content: bytes | bytearray, source: str, error_type: type[UserError]) -> str:
    """Decode UTF-8; raise `error_type` if it is not."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise error_type(
            f"{source}: not UTF-8 at byte {error.start}; iconv -t UTF-8 converts it"
        ) from None


def unescape(text: str) -> str:
    r"""Replace \n, \t, \r and \\ with the characters they stand for."""
    return re.sub(r"\\([ntr\\])", lambda match: ESCAPES[match[1]], text)


def read_line() -> str | None:
    """Read the next line from standard input, with a prompt on a terminal; None at the end."""
    if sys.stdin.isatty():
        print_text("> ")
    line = sys.stdin.buffer.readline()
    if not line and sys.stdin.isatty():
        print_text("\n")
    return decode(line, "standard input", ConfigError).rstrip("\r\n") if line else None


def end_line(text: str) -> None:
    if text and not text.endswith("\n"):
        print_text("\n")


if __name__ == "__main__":
    sys.exit(run_script(main))
