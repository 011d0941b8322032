"""Continue a prompt from a checkpoint: python sample.py --ckpt out/shakespeare --prompt
"ROMEO:"
"""

import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import ConfigError, DataError, UserError, answer, printable
from configs.cli import load_sample, sample_help
from configs.schema import SampleConfig

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # NumPy multiplies one character's numbers: too few to share
BATCH = 64  # samples drawn at once, at most
HELD = (
    2**24
)  # their characters, at most: longer samples are drawn one at a time, each printed as it comes
LONGEST_FILE = 2**28  # bytes


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(sample_help())
        return 0
    options = load_sample(argv)
    text = read_file(options.score, DataError) if options.score else read_prompt(options.prompt)
    voice = Voice(options)
    if options.score:
        voice.score(text)
    elif options.interactive:
        converse(voice, text)
    else:
        speak(voice, text)
    if options.stats:
        print(
            f"{voice.drawn:,} characters, {voice.drawn / max(voice.seconds, 1e-9):,.0f} a second",
            file=sys.stderr,
        )
    return 0


def speak(voice: "Voice", prompt: str) -> None:
    """Print the samples: one alone as it comes, several in batches, each batch when it is
    complete.
    """
    options, prompt, seen = voice.options, voice.known(prompt), voice.model.config.block_size
    if len(prompt) > seen:
        print(
            f"the prompt has {len(prompt):,} characters; the model sees the last {seen:,} at most",
            file=sys.stderr,
        )
    at_once = min(BATCH, max(1, HELD // max(1, options.max_new_tokens)))
    for first in range(0, options.num_samples, at_once):
        samples = range(first, min(first + at_once, options.num_samples))
        steps = voice.go_on(voice.begin(samples, prompt))
        columns = zip(*steps, strict=True) if len(samples) > 1 else [(piece for (piece,) in steps)]
        for i, column in zip(samples, columns, strict=True):
            say(f"---------- sample {i + 1} ----------\n" * (options.num_samples > 1) + prompt)
            for piece in column:
                say(piece)
            say("\n")


def converse(voice: "Voice", prompt: str) -> None:
    """Take turns until Ctrl-D: a typed line begins the text, or a new line of it, and the model
    goes on from there; after an empty one it goes on from where it stopped. A stop text ends its
    turn, and stays in the text unseen.
    """
    prompt = voice.known(prompt)
    text = voice.begin([0], prompt) if prompt else None
    say(prompt)
    end_line(prompt)
    while (line := typed()) is not None:
        try:
            line = voice.known(line)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        if text is None:
            text = voice.begin([0], line)
        else:
            voice.add_line(text, line)
        said = ""
        for (piece,) in voice.go_on(text):
            say(piece)
            said = piece or said
        end_line(said)


class Voice:
    """A checkpoint's model and alphabet, speaking as the options say; it counts what it says."""

    def __init__(self, options: SampleConfig):
        from checkpointing import checkpoint as checkpoints
        from data.tokenizer import CharTokenizer
        from training import runtime

        self.options, self.where = options, runtime.choose(options.device, options.dtype)
        path, note = checkpoints.resolve(Path(options.ckpt), "best")
        if note:
            print(note, file=sys.stderr)
        saved = checkpoints.load(path)
        layout, kernel = (
            None if name == "saved" else name for name in (options.attention, options.kernel)
        )
        model = checkpoints.build_model(saved, ema=saved.ema is not None).with_attention(
            layout, kernel
        )
        self.model, self.tokenizer = model.to(self.where.device), CharTokenizer(saved.vocabulary)
        self.drawn, self.seconds = 0, 0.0

    def known(self, text: str) -> str:
        """`text`, without unknown characters if they are to be skipped; UnknownCharacter (exit 2)
        if not.
        """
        if self.options.unknown == "error":
            self.tokenizer.encode(text)
            return text
        alphabet = frozenset(self.tokenizer.vocabulary)
        known = "".join(c for c in text if c in alphabet)
        if len(known) < len(text):
            print(
                f"left out: {len(text) - len(known):,} characters not in the vocabulary",
                file=sys.stderr,
            )
        return known

    def begin(self, samples: Sequence[int], prompt: str):
        """The `Text` of these samples, with the prompt in it; an empty one is begun as a new line
        is.
        """
        import numpy as np
        import torch

        from model.generate import Sampler, Text

        options = self.options
        sampler = Sampler(
            options.seed,
            samples,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        )
        text = Text(
            self.model.to(self.where.dtype), sampler, cache=options.cache, window=options.window
        )
        if text.lean:
            torch.set_num_threads(text.lean.threads)
        text.read(np.tile(self.tokenizer.encode(prompt or self.tokenizer.start), (len(samples), 1)))
        return text

    def add_line(self, text, line: str) -> None:
        """Let `text` go on with a line that somebody typed."""
        at_start = (
            self.tokenizer.decode(text.ids[0, -1:]) == "\n" or "\n" not in self.tokenizer.vocabulary
        )
        text.read(self.tokenizer.encode(line if at_start or not line else "\n" + line)[None])

    def go_on(self, text) -> Iterator[list[str]]:
        """Let the model write: step by step, what may be shown of each sample, until all have
        ended.
        """
        before = self.tokenizer.decode(text.ids[0])
        ends = [End(self.options.stop, before) for _ in text.ids]
        for _ in range(self.options.max_new_tokens):
            began = time.perf_counter()
            characters = self.tokenizer.decode(text.draw())
            self.seconds += time.perf_counter() - began
            self.drawn += sum(not end.reached for end in ends)
            yield [end.show(character) for end, character in zip(ends, characters, strict=True)]
            if all(end.reached for end in ends):
                return
        yield [end.held for end in ends]

    def score(self, text: str) -> None:
        """Print how well the model predicts `text`: training's exact loss, in training's
        precision.
        """
        from data.batches import Split, evaluation_windows
        from training.evaluate import BITS, exact_loss

        ids = self.tokenizer.encode(self.known(text))
        if len(ids) < 2:
            raise DataError(
                f"{printable(self.options.score)}: {len(ids)} known characters; at least 2 are "
                f"needed"
            )
        windows = evaluation_windows(
            Split(ids, ((0, len(ids)),)), self.model.config.block_size, BATCH
        )
        nats = exact_loss(self.model, windows, self.where)
        print(
            f"{nats:.4f} nats, {nats * BITS:.4f} bits per character, over {len(ids) - 1:,} "
            f"predictions"
        )


class End:
    """Where a sample ends: at a stop text, which may have begun before it. What could become one is
    held back.
    """

    def __init__(self, stops: Sequence[str], before: str):
        self.stops, self.longest = stops, max(map(len, stops), default=0)
        self.text, self.held, self.reached = before[max(0, len(before) - self.longest) :], "", False

    def show(self, character: str) -> str:
        """One character more -> what is certain not to belong to a stop text."""
        if not self.stops or self.reached:
            return "" if self.reached else character
        self.text, self.held = (self.text + character)[-self.longest :], self.held + character
        stop = max(filter(self.text.endswith, self.stops), key=len, default="")
        if stop:
            self.reached, certain = True, len(self.held) - len(stop)
        else:
            tails = (self.text[-n:] for n in range(len(self.text), 0, -1))
            start = next(
                (tail for tail in tails if any(each.startswith(tail) for each in self.stops)), ""
            )
            certain = len(self.held) - len(start)
        shown, self.held = (
            self.held[: max(certain, 0)],
            "" if stop else self.held[max(certain, 0) :],
        )
        return shown


def read_prompt(prompt: str) -> str:
    """The text that `--prompt` stands for: itself, what is in a file, or what comes from standard
    input.
    """
    if prompt == "-":
        return decode(sys.stdin.buffer.read(), "standard input", ConfigError)
    return (
        read_file(prompt.removeprefix("FILE:"), ConfigError)
        if prompt.startswith("FILE:")
        else prompt
    )


def read_file(name: str, kind: type[UserError]) -> str:
    try:
        if not stat.S_ISREG(
            os.stat(name).st_mode
        ):  # a pipe would wait for its writer, a device never end
            raise kind(f"{printable(name)}: not a regular file; name a text file")
        with open(name, "rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise kind(
            f"{printable(name)}: {error.strerror}; name a text file that can be read"
        ) from None
    if len(content) > LONGEST_FILE:
        raise kind(f"{printable(name)}: more than {LONGEST_FILE:,} bytes; give a part of it")
    return decode(content, name, kind)


def decode(content: bytes, where: str, kind: type[UserError]) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(
            f"{printable(where)}: not UTF-8 at byte {error.start}; iconv -t UTF-8 converts it"
        ) from None


def typed() -> str | None:
    """The next line from standard input, asked for if somebody sits there; None at its end."""
    if sys.stdin.isatty():
        say("> ")
    line = sys.stdin.buffer.readline()
    if not line and sys.stdin.isatty():
        say("\n")
    return decode(line, "standard input", ConfigError).rstrip("\r\n") if line else None


def say(text: str) -> None:
    """Print at once: as it is, but on a terminal with escapes for what would steer it."""
    print(printable(text, keep="\n\t") if sys.stdout.isatty() else text, end="", flush=True)


def end_line(text: str) -> None:
    if text and not text.endswith("\n"):
        say("\n")


if __name__ == "__main__":
    sys.exit(answer(main))
