"""Text from a trained model: python sample.py --ckpt out/shakespeare --prompt "ROMEO:"

`LoadedModel` loads a checkpoint and continues prompts; `model/generate.py` has the KV cache and the
random choice. `print_samples` prints what comes. In `sampling/` is what else the options ask for:
`conversation.py` (--interactive), `novel.py` (--novel) and `score.py` (--score); `inputs.py` checks
what the model reads.

A model of a *list* was trained on items that end in a separator: names, one per line. Each of its
samples is one item.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.console import print_stderr, print_text, say
from common.files import expand_home
from common.messages import first_few, quoted
from configs.command import parse_sample_options
from configs.schema import DEFAULT_TEMPERATURE, SampleConfig
from storage.checks import find_checkpoint

if __name__ == "__main__":
    # before importing torch, which takes seconds
    OPTIONS = parse_sample_options()
    find_checkpoint(OPTIONS.ckpt)

import torch

from data.items import ItemFormat
from data.tokenizer import CharTokenizer
from model.generate import Generation, Sampler
from page.export import write_page
from sampling.conversation import converse
from sampling.inputs import checked_prompt, read_source
from sampling.novel import print_longest_passage, print_novel_items
from sampling.score import score
from storage.checkpoint import load_for_sampling, model_of
from training.device import select_runtime

SAMPLES_PER_BATCH = 64  # samples to generate at once


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
        self.model = model_of(self.checkpoint, **{n: c for n, c in chosen.items() if c})
        # generation casts the weights; scoring uses autocast, as training does; a page has float32
        dtype = torch.float32 if options.score or options.html else self.runtime.dtype
        self.model.to(self.runtime.device, dtype)
        self.tokenizer = CharTokenizer(self.checkpoint.vocabulary)

        # a sample of a list is an item, which its separator ends; other text is printed as a line
        self.item_format = ItemFormat.from_settings(self.checkpoint.settings.data)
        item_format = self.item_format or ItemFormat("\n")
        self.separator, self.answer_after = item_format.separator, item_format.answer_after
        self.stops = options.stop + ((self.separator,) if self.item_format else ())
        if never := [s for s in options.stop if not set(s) <= set(self.tokenizer.vocabulary)]:
            print_stderr(f"stop: the model can never write {first_few(map(quoted, never))}")

        # temperature auto: greedy for questions, sampled otherwise
        if options.temperature == "auto":
            options = replace(options, temperature=0 if self.answer_after else DEFAULT_TEMPERATURE)
        self.options = options

    def start_generation(self, prompt: str, numbers: Sequence[int]) -> Generation:
        """Return the beginning of samples, one for each number: the model will continue a prompt.

        A sample depends on the seed and its number, counted from 1, not on the other samples.
        """
        names = ("temperature", "top_k", "top_p", "min_p")
        settings = {name: getattr(self.options, name) for name in names}
        sampler = Sampler(self.options.seed, [number - 1 for number in numbers], **settings)
        generation = Generation(self.model, sampler, cache=self.options.cache)

        # as in training, an item begins after a separator; other text needs a first character
        start = "" if prompt else self.tokenizer.start_character
        if self.item_format:
            start = self.separator[-1]
        generation.append(self.tokenizer.encode(start + prompt)[None].repeat(len(numbers), axis=0))
        return generation

    def continue_texts(
        self, generation: Generation, texts: list[str], stream: bool = False
    ) -> list[str]:
        """Return texts that go on until each ends in a stop string, or up to the length.

        `stream` prints the characters of a single text as they come.
        """
        generated = [list(text) for text in texts]  # of characters: `text + c` would copy the text
        longest_stop = max(map(len, self.stops), default=1)
        ended = [False] * len(texts)
        for _ in range(self.options.max_new_tokens):
            new = self.tokenizer.decode(generation.draw())  # one character for each text
            for i, text in enumerate(generated):
                # those that have ended are still sampled, but do not grow, until all have
                if not ended[i]:
                    text.append(new[i])
                    ended[i] = "".join(text[-longest_stop:]).endswith(self.stops)
            if stream:
                print_text(new)
            if all(ended):
                break
        return ["".join(text) for text in generated]

    def samples(self, prompt: str, numbers: range, stream: bool = False) -> Iterator[str]:
        """Yield samples of a prompt, which are generated in batches."""
        for i in range(0, len(numbers), SAMPLES_PER_BATCH):
            batch = numbers[i : i + SAMPLES_PER_BATCH]
            yield from self.continue_texts(
                self.start_generation(prompt, batch), [prompt] * len(batch), stream
            )


def print_samples(loaded: LoadedModel) -> None:
    """Print one sample, or several with a numbered line above each; items have no such lines.

    With --novel, also name the longest passage of each sample that is in the text of --novel.
    """
    options, prompt = loaded.options, checked_prompt(loaded, loaded.options.prompt)
    name, files = read_source(loaded, options.novel) if options.novel else ("", [])
    first = options.sample or 1
    numbers = range(first, first + (1 if options.sample else options.num_samples))

    # print a single sample while it is generated; several in batches, which is faster
    alone = len(numbers) == 1
    print_text(prompt if alone else "")
    for number, text in enumerate(loaded.samples(prompt, numbers, alone), first):
        heading = "" if loaded.item_format else f"---------- sample {number} ----------\n"
        end = "" if text.endswith(loaded.separator) else loaded.separator
        print_text(end if alone else heading + text + end)
        if options.novel:
            print_longest_passage(text.removeprefix(prompt), name, "".join(files))


def write_html(loaded: LoadedModel) -> None:
    """Write a page that runs the model in a browser, and print its size."""
    # without a prompt, the page begins with the example question, if there is one
    options, prompt = loaded.options, loaded.options.prompt
    prompt = prompt and checked_prompt(loaded, prompt)
    size = write_page(expand_home(options.html), loaded.checkpoint, loaded.model, options, prompt)
    say(f"{options.html}: {size / 1e6:,.1f} MB; open it in a browser")


if __name__ == "__main__":
    raise SystemExit(main(OPTIONS))
