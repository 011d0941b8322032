"""Text from a trained model: python sample.py --ckpt out/shakespeare --prompt "ROMEO:"

`main` calls one of five functions: `print_samples`, `print_novel_items`, `converse`, `score` or
`write_html`. All of them use a `LoadedModel`.

A model of a *list* was trained on items that end in a separator: names, one per line. Each of its
samples is one item.
"""

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from common.console import ConfigError, DataError, print_stderr, print_text, say
from common.files import expand_home
from common.messages import counted, first_few, quoted, quoted_character
from configs.command import parse_sample_options
from configs.schema import DEFAULT_TEMPERATURE, SampleConfig
from storage.checks import find_checkpoint

if __name__ == "__main__":
    # before importing torch, which takes seconds
    OPTIONS = parse_sample_options()
    find_checkpoint(OPTIONS.ckpt)

import torch

from data.batches import Split, evaluation_windows
from data.items import ItemFormat
from data.text import read_text
from data.tokenizer import CharTokenizer
from model.generate import Generation, Sampler
from page.export import write_page
from storage.checkpoint import build_model, load_for_sampling
from training.device import select_runtime
from training.evaluate import BITS_PER_NAT, evaluation_batch_size, window_losses

SAMPLES_PER_BATCH = 64  # samples to generate at once
DRAWS_PER_ITEM = 100  # samples to generate, at most, for each item that --novel should find


def main(options: SampleConfig) -> int:
    """Do what the options say; return the exit code."""
    loaded = LoadedModel(options)
    if options.interactive:
        return converse(loaded)
    if options.html:
        write_html(loaded)
    elif options.score:
        score(loaded)
    elif options.novel and loaded.item_format:
        if options.sample:
            raise ConfigError(
                "sample: --novel of a list draws until it has new items; leave it out"
            )
        print_novel_items(loaded)
    else:
        print_samples(loaded)
    return 0


class LoadedModel:
    """The model of a checkpoint with its tokenizer, and the options to sample from it."""

    def __init__(self, options: SampleConfig):
        self.runtime = select_runtime(options.device, options.dtype)
        self.checkpoint = load_for_sampling(options.ckpt)
        chosen = {"layout": options.layout, "kernel": options.kernel}
        self.model = build_model(self.checkpoint, **{n: c for n, c in chosen.items() if c})
        # generation casts the weights; scoring uses autocast, as training does; a page has float32
        dtype = torch.float32 if options.score or options.html else self.runtime.dtype
        self.model.to(self.runtime.device, dtype)
        self.tokenizer = CharTokenizer(self.checkpoint.vocabulary)

        # each sample of a list is an item, and the separator ends it
        self.item_format = ItemFormat.from_settings(self.checkpoint.settings.data)
        item_format = self.item_format or ItemFormat("\n")
        self.end, self.answer_after = item_format.separator, item_format.answer_after
        self.stops = options.stop + ((self.end,) if self.item_format else ())
        if never := [s for s in options.stop if not set(s) <= set(self.tokenizer.vocabulary)]:
            print_stderr(f"stop: the model can never write {first_few(map(quoted, never))}")

        # temperature auto: greedy for questions, sampled otherwise
        if options.temperature == "auto":
            options = replace(options, temperature=0 if self.answer_after else DEFAULT_TEMPERATURE)
        self.options = options

    def without_unknown(self, texts: Sequence[str]) -> list[str]:
        """Return texts without characters that the model has never read; a note names these.

        A letter typed as `e` and an accent becomes `é` (NFC), unless the model has read both.
        """
        if not set().union(*texts) <= set(self.tokenizer.vocabulary):
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        unknown = sorted(set().union(*texts).difference(self.tokenizer.vocabulary))
        if unknown:
            print_stderr(f"left out, never read: {first_few(map(quoted_character, unknown))}")
        return [text.translate(dict.fromkeys(map(ord, unknown))) for text in texts]

    def read_source(self, source: str) -> tuple[str, list[str]]:
        """Return the name of a text, and the characters of its files, as training reads them.

        `source` is a file, folder or pattern, as in --sources.
        """
        text = read_text((source,), self.checkpoint.settings.data.encoding)
        for note in text.notes:
            print_stderr(note)
        return text.label, self.without_unknown(text.contents)

    def checked_prompt(self, text: str, where: str = "prompt") -> str:
        """Return a prompt or a typed line; raise ConfigError if no item could begin with it."""
        (text,) = self.without_unknown([text])
        # a model of a list has only seen single items
        if self.item_format and self.end in text:
            raise ConfigError(f"{where}: {quoted(self.end)} ends an item; give the start of one")

        # a model of answers needs a question; the end of a line may end it
        if self.answer_after not in text and self.answer_after.endswith("\n"):
            text += "\n"
        if self.answer_after not in text:
            raise ConfigError(
                f"{where}: this model answers questions that end in {quoted(self.answer_after)}; "
                f"ask one, such as {quoted(self.checkpoint.text['question'])}"
            )
        return text

    def start_samples(self, prompt: str, numbers: Sequence[int]) -> Generation:
        """Begin samples with a prompt.

        A sample depends on the seed and its number, counted from 1, not on the other samples.
        """
        names = ("temperature", "top_k", "top_p", "min_p")
        settings = {name: getattr(self.options, name) for name in names}
        sampler = Sampler(self.options.seed, [number - 1 for number in numbers], **settings)
        generation = Generation(self.model, sampler, cache=self.options.cache)

        # as in training, an item begins after a separator; other text needs a first character
        start = "" if prompt else self.tokenizer.start_character
        if self.item_format:
            start = self.end[-1]
        generation.append(self.tokenizer.encode(start + prompt)[None].repeat(len(numbers), axis=0))
        return generation

    def continue_texts(
        self, generation: Generation, texts: list[str], stream: bool = False
    ) -> list[str]:
        """Return texts that go on until each ends in a stop string, or up to the length.

        `stream` prints the characters of a single text as they come.
        """
        written = [list(text) for text in texts]  # of characters: `text + c` would copy the text
        longest_stop = max(map(len, self.stops), default=1)
        ended = [False] * len(texts)
        for _ in range(self.options.max_new_tokens):
            new = self.tokenizer.decode(generation.draw())  # one character for each text
            for i, text in enumerate(written):
                # those that have ended are still sampled, but do not grow, until all have
                if not ended[i]:
                    text.append(new[i])
                    ended[i] = "".join(text[-longest_stop:]).endswith(self.stops)
            if stream:
                print_text(new)
            if all(ended):
                break
        return ["".join(text) for text in written]

    def samples(self, prompt: str, numbers: range, stream: bool = False) -> Iterator[str]:
        """Yield samples of a prompt, which are generated in batches."""
        for i in range(0, len(numbers), SAMPLES_PER_BATCH):
            batch = numbers[i : i + SAMPLES_PER_BATCH]
            yield from self.continue_texts(
                self.start_samples(prompt, batch), [prompt] * len(batch), stream
            )


# ------------------------------------------------------------------------------------ print samples


def print_samples(loaded: LoadedModel) -> None:
    """Print one sample, or several with a numbered line above each; items have no such lines.

    With --novel, also name the longest passage of each sample that is in the text of --novel.
    """
    options, prompt = loaded.options, loaded.checked_prompt(loaded.options.prompt)
    name, files = loaded.read_source(options.novel) if options.novel else ("", [])
    first = options.sample or 1
    numbers = range(first, first + (1 if options.sample else options.num_samples))

    # print a single sample while it is generated; several in batches, which is faster
    alone = len(numbers) == 1
    print_text(prompt if alone else "")
    for number, text in enumerate(loaded.samples(prompt, numbers, alone), first):
        heading = "" if loaded.item_format else f"---------- sample {number} ----------\n"
        end = "" if text.endswith(loaded.end) else loaded.end
        print_text(end if alone else heading + text + end)
        if options.novel:
            passage = longest_passage(text.removeprefix(prompt), "".join(files))
            length = counted(len(passage), "character")
            print_stderr(f"longest passage that is in {name}: {length}: {quoted(passage)}")


def longest_passage(text: str, original: str) -> str:
    """Return the longest passage of a text that is in another one; of several, the first."""
    passage = ""
    for end in range(1, len(text) + 1):
        # one character longer than the longest so far: a passage grows by one at each step
        longer = text[end - len(passage) - 1 : end]
        passage = longer if longer in original else passage
    return passage


def print_novel_items(loaded: LoadedModel) -> None:
    """Print the first samples that are whole items and not in the text of --novel, each once."""
    options, prompt = loaded.options, loaded.checked_prompt(loaded.options.prompt)
    name, files = loaded.read_source(options.novel)
    known = {"", *loaded.item_format.items_of(name, files)}

    # a model that has memorized its list may never get there
    new, drawn = 0, 0
    for text in loaded.samples(prompt, range(1, DRAWS_PER_ITEM * options.num_samples + 1)):
        drawn += 1
        item = text.removesuffix(loaded.end)
        if item not in known and item != text:  # whole: not cut by --max_new_tokens or --stop
            known.add(item)
            new += 1
            print_text(text)
        if new == options.num_samples:
            break
    print_stderr(f"{counted(new, 'new item')} of {drawn:,} drawn; others: in {name}, twice or cut")


# ------------------------------------------------------------------------------------- conversation


def converse(loaded: LoadedModel) -> int:
    """Hold a conversation until Ctrl-D; return the exit code: 2 if a line was refused, otherwise 0.

    A typed line begins a new line of the text, and the model continues it; after an empty line the
    model goes on. A string of --stop that ends a reply, such as `Ann:`, is the beginning of the
    next typed line. With a model of a list, each turn is an item: prompt, typed line and reply.
    """
    typing = sys.stdin.isatty()
    if hasattr(sys.stdin, "reconfigure"):  # not so in notebooks and IDLE
        sys.stdin.reconfigure(encoding=None if typing else "utf-8-sig", errors="surrogateescape")
    if typing:
        with suppress(ImportError):  # Windows edits lines without it
            import readline  # noqa: F401 - `input` then has the arrow keys
        print_stderr("the model continues what you type; an empty line lets it go on; Ctrl-D ends")

    # a text is one long sample; of a list, each item is the next sample
    is_list, prompt, first = bool(loaded.item_format), loaded.options.prompt, loaded.options.sample
    ends = ("\n", *loaded.stops) if "\n" in loaded.tokenizer.vocabulary else ""  # "" always fits
    text, exit_code = "\n", 0  # a text begins at the start of a line
    if not is_list:
        text += loaded.checked_prompt(prompt)
        generation, prompt = loaded.start_samples(text[1:], [first or 1]), ""
        print_text(text[1:])
    for number in count(1):
        print_text("" if text.endswith("\n") else "\n")
        try:
            line = input("> " if typing else "")
        except EOFError:
            print_text("\n" if typing else "")
            return exit_code

        try:
            line = loaded.checked_prompt(prompt + line, f"line {number}")
        except ConfigError as error:
            print_stderr(f"error: {error}")
            exit_code, text = 2, "\n"
            print_text("" if typing else "\n")  # answers stay beside their questions
            continue
        if is_list:
            generation, text = loaded.start_samples(line, [(first or 1) + number - 1]), ""
        else:
            line = line if text.endswith(ends) or not line else f"\n{line}"
            generation.append(loaded.tokenizer.encode(line)[None])
        (text,) = loaded.continue_texts(generation, [text + line], stream=True)


# -------------------------------------------------------------------------------------- score, page


def score(loaded: LoadedModel) -> None:
    """Print the mean loss over every character of a text; a list is scored item by item."""
    item_format, tokenizer = loaded.item_format, loaded.tokenizer
    name, files = loaded.read_source(loaded.options.score)
    texts = item_format.items_of(name, files) if item_format else ["".join(files)]
    # each character is predicted once, except the first of a text
    if not texts or (not item_format and len(texts[0]) < 2):
        raise DataError(f"{name}: nothing to predict; at least 2 known characters are needed")
    encode = tokenizer.encode
    split = item_format.encode_items(texts, encode) if item_format else Split(encode(texts[0]))
    block_size = loaded.model.config.block_size
    windows = evaluation_windows(
        split, block_size, evaluation_batch_size(block_size, len(tokenizer))
    )
    losses = window_losses(loaded.model, windows, loaded.runtime)

    # in nats, and in bits, which other reports use
    line = (
        f"{losses.mean:.4f} nats, {losses.mean * BITS_PER_NAT:.4f} bits per character, over "
        f"{counted(int(losses.counts.sum()), 'prediction')}"
    )
    if item_format:
        per_item = losses.sums.sum() / len(texts)
        line += f"; {per_item:.4f} nats per item, over {counted(len(texts), 'item')}"
    if loaded.answer_after:
        line += f"; {1 - len(losses.wrong_documents) / len(texts):.2%} exact match"
    say(line)


def write_html(loaded: LoadedModel) -> None:
    """Write a page that runs the model in a browser, and print its size."""
    # without a prompt, the page begins with the example question, if there is one
    options, prompt = loaded.options, loaded.options.prompt
    prompt = prompt and loaded.checked_prompt(prompt)
    size = write_page(expand_home(options.html), loaded.checkpoint, loaded.model, options, prompt)
    say(f"{options.html}: {size / 1e6:,.1f} MB; open it in a browser")


if __name__ == "__main__":
    raise SystemExit(main(OPTIONS))
