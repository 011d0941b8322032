"""A conversation with a model: typed lines in, replies out, on a terminal or in a pipe.

A model of a list answers each line with an item of its own: `1+1=` with `2`. Any other model writes
one text, to which typed lines are added, as if you and the model shared a keyboard.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress

from common.console import ConfigError, print_stderr, print_text
from sampling.inputs import checked_prompt


def converse(loaded) -> int:
    """Hold a conversation until Ctrl-D; return the exit code: 2 if a line was refused, otherwise 0.

    Each reply ends at a stop string, or after max_new_tokens characters.
    """
    typing = sys.stdin.isatty()
    if hasattr(sys.stdin, "reconfigure"):  # not so in notebooks and IDLE
        # PowerShell begins what it pipes with a byte order mark
        sys.stdin.reconfigure(encoding=None if typing else "utf-8-sig", errors="surrogateescape")
    if typing:
        with suppress(ImportError):  # Windows edits lines without it
            import readline  # `input` then has the arrow keys

            # a terminal hands on a Ctrl-D that was typed during a reply as Ctrl-@
            readline.parse_and_bind(r'"\C-@": "\C-d"')
        print_stderr("the model continues what you type; an empty line lets it go on; Ctrl-D ends")
    return converse_in_items(loaded) if loaded.item_format else converse_in_text(loaded)


def converse_in_text(loaded) -> int:
    """Let the model continue one text, in which each typed line begins a new line; return 0.

    After an empty line the model simply goes on. A stop string that ends a reply, such as `Ann:`,
    is the beginning of the next typed line.
    """
    prompt = checked_prompt(loaded, loaded.options.prompt)
    generation = loaded.start_generation(prompt, [loaded.options.sample or 1])
    print_text(prompt)
    text = f"\n{prompt}"  # the start of a text is the start of a line
    end_line(text)

    newline = "\n" if "\n" in loaded.tokenizer.vocabulary else ""  # never read: cannot be encoded
    for line in typed_lines():
        line = checked_prompt(loaded, line)
        if line and not text.endswith(("\n", *loaded.stops)):
            line = newline + line
        generation.append(loaded.tokenizer.encode(line)[None])
        (text,) = loaded.continue_texts(generation, [text + line], stream=True)
        end_line(text)
    return 0


def converse_in_items(loaded) -> int:
    """Let the model complete an item for each line: prompt, line, reply; return the exit code."""
    first, exit_code = loaded.options.sample or 1, 0
    for i, line in enumerate(typed_lines()):
        try:
            start = checked_prompt(loaded, loaded.options.prompt + line, f"line {i + 1}")
        except ConfigError as error:
            print_stderr(f"error: {error}")
            # in a pipe, an empty line keeps the next answers beside their questions
            print_text("" if sys.stdin.isatty() else "\n")
            exit_code = 2
            continue
        # each item is the next sample of the seed
        generation = loaded.start_generation(start, [first + i])
        (item,) = loaded.continue_texts(generation, [start], stream=True)
        end_line(item)
    return exit_code


def typed_lines() -> Iterator[str]:
    """Yield the lines of standard input up to its end, which is Ctrl-D on a terminal."""
    typing = sys.stdin.isatty()
    with suppress(EOFError):
        while True:
            yield input("> " if typing else "")
    print_text("\n" if typing else "")


def end_line(text: str) -> None:
    """Print a newline, unless the text that is on the screen ends in one."""
    print_text("" if text.endswith("\n") else "\n")
