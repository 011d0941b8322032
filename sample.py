"""Generate text from a checkpoint: python sample.py --ckpt out/shakespeare --prompt "ROMEO:" """

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError, DataError, UserError, escape, run_command
from common.files import read_regular
from configs.cli import load_sample, sample_help
from configs.schema import SampleConfig

if TYPE_CHECKING:
    import numpy as np

    from model.generate import Generation

# Single-token products are too small to multithread; read when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
MAX_BATCH = 64  # samples
MAX_BUFFERED = 2**24  # characters of a batch; longer samples are drawn and printed one at a time
MAX_FILE = 2**28  # bytes


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(sample_help())
        return 0
    options = load_sample(argv)
    if options.html:
        from page.export import check_target

        check_target(Path(options.html), options.overwrite)
    text = read_text(options.score, DataError) if options.score else read_prompt(options.prompt)
    session = Session(options)
    if options.html:
        session.write_page(text)
    elif options.score:
        session.score(text)
    elif options.interactive:
        chat(session, text)
    else:
        print_samples(session, text)
    if options.stats:
        rate = session.drawn / max(session.seconds, 1e-9)
        print(f"{session.drawn:,} characters, {rate:,.0f} a second", file=sys.stderr)
    return 0


def print_samples(session: "Session", prompt: str) -> None:
    """Print a single sample as it is drawn, several in batches, each batch when it is complete."""
    options, ids = session.options, session.encode(prompt)
    block_size = session.model.config.block_size
    if len(ids) > block_size:
        print(
            f"the prompt has {len(ids):,} characters; the model sees at most the last "
            f"{block_size:,}",
            file=sys.stderr,
        )
    prompt = session.tokenizer.decode(ids)
    batch = min(MAX_BATCH, max(1, MAX_BUFFERED // max(1, options.max_new_tokens)))
    for first in range(0, options.num_samples, batch):
        samples = range(first, min(first + batch, options.num_samples))
        steps = session.generate(session.begin(samples, ids))
        if len(samples) == 1:
            columns = [(piece for (piece,) in steps)]
        else:
            columns = zip(*steps, strict=True)
        for i, pieces in zip(samples, columns, strict=True):
            heading = f"---------- sample {i + 1} ----------\n" * (options.num_samples > 1)
            write(heading + prompt)
            for piece in pieces:
                write(piece)
            write("\n")


def chat(session: "Session", prompt: str) -> None:
    """Take turns until Ctrl-D: append a typed line to the text, then let the model continue.

    After an empty line the model continues from where it stopped. A stop string ends the turn; it
    stays in the context but is not printed.
    """
    ids = session.encode(prompt)
    generation = session.begin([0], ids) if len(ids) else None
    prompt = session.tokenizer.decode(ids)
    write(prompt)
    end_line(prompt)
    while (line := read_line()) is not None:
        try:
            ids = session.encode(line)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        if generation is None:
            generation = session.begin([0], ids)
        else:
            session.append_line(generation, ids)
        last = ""
        for (piece,) in session.generate(generation):
            write(piece)
            last = piece or last
        end_line(last)


class Session:
    """The model and tokenizer of a checkpoint, used as the options say, and what was drawn."""

    def __init__(self, options: SampleConfig):
        from checkpointing import checkpoint as checkpoints
        from data.tokenizer import CharTokenizer
        from training import runtime

        self.options = options
        self.runtime = runtime.select_runtime(options.device, options.dtype)
        path, note = checkpoints.resolve(Path(options.ckpt), "best")
        if note:
            print(note, file=sys.stderr)
        saved = checkpoints.load(path)
        chosen = {"attention": options.attention, "kernel": options.kernel}
        chosen = {name: value for name, value in chosen.items() if value != "saved"}
        model = checkpoints.build_model(saved, dataclasses.replace(saved.config.model, **chosen))
        self.model = model.to(self.runtime.device)
        self.tokenizer = CharTokenizer(saved.vocabulary)
        self.saved = dataclasses.replace(saved, tensors={})  # without those of the optimizers
        self.drawn, self.seconds = 0, 0.0  # characters, and the time for them

    def encode(self, text: str) -> "np.ndarray":
        """Encode a text, without its unknown characters if they are to be skipped.

        Raises UnknownCharacter (exit 2) if they are not.
        """
        if self.options.unknown == "skip":
            vocabulary = frozenset(self.tokenizer.vocabulary)
            known = "".join(c for c in text if c in vocabulary)
            if len(known) < len(text):
                skipped = len(text) - len(known)
                print(f"skipped {skipped:,} characters not in the vocabulary", file=sys.stderr)
            text = known
        return self.tokenizer.encode(text)

    def begin(self, samples: Sequence[int], ids: "np.ndarray") -> "Generation":
        """Start the samples of these numbers with the prompt, or with a newline if it is empty."""
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
            notify=lambda line: print(line, file=sys.stderr),
        )
        if generation.decoder:
            torch.set_num_threads(generation.decoder.threads)
        if not len(ids):
            ids = self.tokenizer.encode(self.tokenizer.start)
        generation.append(np.tile(ids, (len(samples), 1)))
        return generation

    def append_line(self, generation: "Generation", ids: "np.ndarray") -> None:
        """Append a typed line to the text, on a line of its own."""
        import numpy as np

        at_start = self.tokenizer.decode(generation.ids[0, -1:]) == "\n"
        if len(ids) and not at_start and "\n" in self.tokenizer.vocabulary:
            ids = np.concatenate([self.tokenizer.encode("\n"), ids])
        generation.append(ids[None])

    def generate(self, generation: "Generation") -> Iterator[list[str]]:
        """Draw characters until all samples have ended; yield what each adds to the output."""
        context = self.tokenizer.decode(generation.ids[0])
        stops = [StopStrings(self.options.stop, context) for _ in generation.ids]
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
        print(f"{escape(options.html)}: {size / 1e6:,.1f} MB{half}; open it in a browser")

    def score(self, text: str) -> None:
        """Print the exact loss of a text, in training's precision."""
        from data.batches import Split, evaluation_windows
        from training.evaluate import BATCH_SIZE, BITS_PER_NAT, exact_loss

        ids = self.encode(text)
        if len(ids) < 2:
            raise DataError(
                f"{escape(self.options.score)}: {len(ids)} known characters; at least 2 are needed"
            )
        split = Split(ids, ((0, len(ids)),))
        windows = evaluation_windows(split, self.model.config.block_size, BATCH_SIZE)
        nats = exact_loss(self.model, windows, self.runtime)
        print(
            f"{nats:.4f} nats, {nats * BITS_PER_NAT:.4f} bits per character, "
            f"over {len(ids) - 1:,} predictions"
        )


class StopStrings:
    """The end of a sample at a stop string, which may have begun in the context.

    Text that may be the start of a stop string is buffered, in `pending`.
    """

    def __init__(self, stops: Sequence[str], context: str):
        self.stops, self.longest = stops, max(map(len, stops), default=0)
        self.tail = context[max(0, len(context) - self.longest) :]
        self.pending, self.reached = "", False

    def feed(self, character: str) -> str:
        """Take one more character; return what is certain not to belong to a stop string."""
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
        """Return the longest end of the text that a stop string starts with."""
        for n in range(len(self.tail), 0, -1):
            if any(stop.startswith(self.tail[-n:]) for stop in self.stops):
                return self.tail[-n:]
        return ""


def read_prompt(prompt: str) -> str:
    """Return the text that --prompt stands for: itself, a file's, or that of standard input."""
    if prompt == "-":
        return decode(sys.stdin.buffer.read(), "standard input", ConfigError)
    if prompt.startswith("FILE:"):
        return read_text(prompt.removeprefix("FILE:"), ConfigError)
    return prompt


def read_text(name: str, error_type: type[UserError]) -> str:
    """Read a text file; raise `error_type` if it cannot be read."""
    try:
        content = read_regular(name, MAX_FILE)
    except OSError as error:
        raise error_type(
            f"{escape(name)}: {error.strerror}; name a text file that can be read"
        ) from None
    return decode(content, name, error_type)


def decode(content: bytes | bytearray, source: str, error_type: type[UserError]) -> str:
    """Decode UTF-8; raise `error_type` if it is not."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise error_type(
            f"{escape(source)}: not UTF-8 at byte {error.start}; iconv -t UTF-8 converts it"
        ) from None


def read_line() -> str | None:
    """Read the next line from standard input, with a prompt on a terminal; None at the end."""
    if sys.stdin.isatty():
        write("> ")
    line = sys.stdin.buffer.readline()
    if not line and sys.stdin.isatty():
        write("\n")
    return decode(line, "standard input", ConfigError).rstrip("\r\n") if line else None


def write(text: str) -> None:
    """Print at once: unchanged, but with control characters escaped on a terminal."""
    print(escape(text, keep="\n\t") if sys.stdout.isatty() else text, end="", flush=True)


def end_line(text: str) -> None:
    if text and not text.endswith("\n"):
        write("\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
