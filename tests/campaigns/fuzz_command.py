"""Fuzzed command lines of train.py and sample.py: each is understood, or refused in one line before
torch is imported.

In one process up to where torch would be needed, and every hundredth line as a real command.
"""

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack, chdir, nullcontext
from dataclasses import Field
from unittest.mock import patch

from hypothesis import strategies as st

import sample
import train
from configs.cli import Actions
from configs.fields import settings_of
from configs.schema import Config, SampleConfig
from tests.campaigns.fuzzing import (
    AWKWARD,
    PLAUSIBLE,
    Answer,
    Tally,
    call,
    can_be_real,
    chance,
    likely_value,
    main,
    of_hypothesis,
    real,
)
from tests.conftest import ROOT

SAMPLE = settings_of(SampleConfig)
ALIASES = {alias: this for this in SAMPLE.values() for alias in this.metadata["aliases"]}
OPTIONS = {"train.py": settings_of(Actions) | settings_of(Config), "sample.py": SAMPLE | ALIASES}
START = {"train.py": ["configs/smoke.yaml"], "sample.py": ["--ckpt=nowhere"]}
STRAY = [
    "configs/shakespeare.yaml",
    "configs",
    "configs/smoke.yml",
    "README.md",
    "/dev/null",
    "/dev/zero",
    "train.py",
]
STRAY += [
    "-",
    "--",
    "-h",
    "--help",
    "---seed=1",
    "--=1",
    "--.=1",
    "--model",
    "--model.=1",
    "seed=1",
    "—resume",
]
STRAY += [
    "ROMEO:",
    "\udcff",
    "--prompt=-",
    "--prompt=FILE:none",
    "--prompt=FILE:",
    "--prompt=FILE:configs",
]
STRAY += ["--score=README.md", "--score=configs", "--interactive", "--stats"]


def written(rng: random.Random, options: dict[str, Field]) -> list[str]:
    """An option as somebody may write it, mostly right."""
    name = rng.choice(list(options))
    value = likely_value(rng, options[name])
    name = rng.choice([name, name, name.rpartition(".")[2], name.replace("_", "-")])
    return rng.choice(
        [[f"--{name}={value}"], [f"--{name}={value}"], [f"--{name}", value], [f"--{name}"]]
    )


def options_of(rng: random.Random, script: str) -> list[str]:
    """A line of options."""
    lists = (written(rng, OPTIONS[script]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 8])))
    words = [*START[script], *(word for each in lists for word in each)]
    if rng.random() < 0.1:
        words.insert(rng.randint(0, len(words)), rng.choice(STRAY))
    return words


def mutated(rng: random.Random, script: str) -> list[str]:
    """A line of options with letters and words changed, lost, repeated or moved."""
    words = options_of(rng, script)
    for _ in range(rng.choice([1, 1, 2, 4])):
        i = rng.randrange(len(words))
        word, at = words[i], rng.randint(0, len(words[i]))
        piece = rng.choice(
            [
                "",
                "",
                "-",
                "=",
                ".",
                "_",
                " ",
                ",",
                "x",
                rng.choice(AWKWARD),
                chr(rng.randrange(0x3000)),
            ]
        )
        changed = word[:at] + piece + word[at + rng.choice([0, 1]) :]
        words[i : i + 1] = rng.choice([[changed], [changed], [changed], [], [word, word]])
        words = words or [""]
        if rng.random() < 0.2:
            rng.shuffle(words)
    return words


def nonsense(rng: random.Random, script: str) -> list[str]:
    """Words of all kinds."""
    names = [f"--{name}" for name in OPTIONS[script]]
    words = [rng.choice([*names, *STRAY, *AWKWARD, *PLAUSIBLE]) for _ in range(rng.randint(0, 6))]
    return [
        rng.choice([word, word, f"--{word}", f"{word}={rng.choice(AWKWARD)}"]) for word in words
    ]


NAMES = [f"--{name}" for options in OPTIONS.values() for name in options]
WORDS = st.sampled_from([*STRAY, *AWKWARD, *NAMES]) | st.text()
LINES = st.lists(WORDS | st.builds("{}={}".format, WORDS, WORDS), max_size=6)
COMMANDS = {"train.py": train.main, "sample.py": sample.main}
KINDS: dict[str, Callable[[random.Random, str], list[str]]] = {
    "options": options_of,
    "mutated": mutated,
    "nonsense": nonsense,
}


class Silence:
    """In the place of what needs torch: it takes anything, and says nothing."""

    drawn, seconds = 0, 0.0

    def __init__(self, *_): ...

    def score(self, text: str) -> None: ...


def run(cases: int) -> Tally:
    """Try `cases` lines, half for each command, as many of each kind."""
    tally = Tally("command lines", allowed={0, 2, 3})
    each = cases // (2 * (len(KINDS) + 1))
    with ExitStack() as stack:
        stack.enter_context(chdir(ROOT))
        stack.enter_context(patch.dict(sys.modules, {"torch": None}))
        stack.enter_context(patch.object(train, "only_writer", nullcontext))
        stack.enter_context(patch.object(train, "train", lambda *_: None))
        stack.enter_context(patch.object(sample, "Session", Silence))
        stack.enter_context(patch.multiple(sample, print_samples=Silence, chat=Silence))

        def check(script: str, kind: str, number: int, argv: list[str]) -> None:
            found = call(COMMANDS[script], *argv)
            tally.add(f"{script}, {kind}", number, argv, found)
            if tally.is_sampled and can_be_real(argv):
                tally.add(f"{script}, in a process", number, argv, really(script, argv, found))

        for script in COMMANDS:
            for kind, make in KINDS.items():
                for number in range(each):
                    check(script, kind, number, make(chance(kind, number), script))
            of_hypothesis(
                LINES, each, lambda words, s=script: check(s, "hypothesis", 0, START[s] + words)
            )
    return tally


def really(script: str, argv: list[str], expected: Answer) -> Answer:
    """The answer of the command itself, which must be the same; one that was understood is only
    asked to print it.
    """
    if expected.code == 0 and not expected.out:
        argv = [*argv, "--print-config" if script == "train.py" else "--help"]
    found = real(script, *argv)
    assert found.code == expected.code and found.err == expected.err, (
        script,
        argv,
        found,
        expected,
    )
    return found


if __name__ == "__main__":
    main(run, cases=10_000)
