"""--novel: what a model writes that is not in a text, such as that of its training."""

from common.console import ConfigError, print_stderr, print_text
from common.messages import counted, quoted
from sampling.inputs import checked_prompt, read_source

DRAWS_PER_ITEM = 100  # samples to generate, at most, for each new item


def print_longest_passage(text: str, name: str, original: str) -> None:
    """Name the longest passage of a sample that is in the original text, which has a name."""
    passage = longest_passage(text, original)
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


def print_novel_items(loaded) -> None:
    """Print the first samples that are whole items and not in the text of --novel, each once."""
    options = loaded.options
    if options.sample:
        raise ConfigError("sample: --novel of a list draws until it has new items; leave it out")
    prompt = checked_prompt(loaded, options.prompt)
    name, files = read_source(loaded, options.novel)
    known = {"", *loaded.item_format.items_of(name, files)}

    # a model that has memorized its list may never get there
    new, drawn = 0, 0
    for text in loaded.samples(prompt, range(1, DRAWS_PER_ITEM * options.num_samples + 1)):
        drawn += 1
        item = text.removesuffix(loaded.separator)
        if item not in known and item != text:  # whole: not cut by --max_new_tokens or --stop
            known.add(item)
            new += 1
            print_text(text)
        if new == options.num_samples:
            break
    print_stderr(f"{counted(new, 'new item')} of {drawn:,} drawn; others: in {name}, twice or cut")
