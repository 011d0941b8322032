"""Campaign: random command lines of train.py and sample.py.

Each must be accepted, or rejected in one line before torch is imported.

All run in this process up to where torch is needed, and every hundredth also in a subprocess.
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
from configs.cli import CommandLineOptions
from configs.fields import settings_of
from configs.schema import Config, SampleConfig
from tests.campaigns.fuzzing import (
    AWKWARD,
    PLAUSIBLE,
    Result,
    Tally,
    call,
    call_in_subprocess,
    can_be_passed_to_a_process,
    check_with_hypothesis,
    likely_value,
    main,
    rng_of,
)
from tests.commands import sample_main, train_main
from tests.conftest import ROOT

SAMPLE = settings_of(SampleConfig)
ALIASES = {alias: field for field in SAMPLE.values() for alias in field.metadata["aliases"]}
OPTIONS = {
    "train.py": settings_of(CommandLineOptions) | settings_of(Config),
    "sample.py": SAMPLE | ALIASES,
}
START = {"train.py": ["configs/smoke.yaml"], "sample.py": ["--ckpt=nowhere"]}
STRAY = [
    "configs/shakespeare.yaml", "configs", "configs/smoke.yml", "README.md", "/dev/null",
    "/dev/zero", "train.py", "-", "--", "-h", "--help", "---seed=1", "--=1", "--.=1", "--model",
    "--model.=1", "seed=1", "—resume", "ROMEO:", "\udcff", "--prompt=-", "--prompt=FILE:none",
    "--prompt=FILE:", "--prompt=FILE:configs", "--score=README.md", "--score=configs",
    "--interactive", "--stats",
]  # fmt: skip


def random_option(rng: random.Random, options: dict[str, Field]) -> list[str]:
    """Return an option in one of its forms, mostly valid."""
    name = rng.choice(list(options))
    value = likely_value(rng, options[name])
    name = rng.choice([name, name, name.rpartition(".")[2], name.replace("_", "-")])
    return rng.choice(
        [[f"--{name}={value}"], [f"--{name}={value}"], [f"--{name}", value], [f"--{name}"]]
    )


def random_options(rng: random.Random, script: str) -> list[str]:
    """Return a command line of options."""
    lists = (random_option(rng, OPTIONS[script]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 8])))
    words = [*START[script], *(word for each in lists for word in each)]
    if rng.random() < 0.1:
        words.insert(rng.randint(0, len(words)), rng.choice(STRAY))
    return words


def mutated(rng: random.Random, script: str) -> list[str]:
    """Return a command line with letters and words changed, removed, repeated or moved."""
    words = random_options(rng, script)
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
    """Return a command line of arbitrary words."""
    names = [f"--{name}" for name in OPTIONS[script]]
    words = [rng.choice([*names, *STRAY, *AWKWARD, *PLAUSIBLE]) for _ in range(rng.randint(0, 6))]
    return [
        rng.choice([word, word, f"--{word}", f"{word}={rng.choice(AWKWARD)}"]) for word in words
    ]


NAMES = [f"--{name}" for options in OPTIONS.values() for name in options]
WORDS = st.sampled_from([*STRAY, *AWKWARD, *NAMES]) | st.text()
LINES = st.lists(WORDS | st.builds("{}={}".format, WORDS, WORDS), max_size=6)
COMMANDS = {"train.py": train_main, "sample.py": sample_main}
KINDS: dict[str, Callable[[random.Random, str], list[str]]] = {
    "options": random_options,
    "mutated": mutated,
    "nonsense": nonsense,
}


class Stub:
    """A replacement for functions that need torch: it accepts anything and prints nothing."""

    drawn, seconds = 0, 0.0

    def __init__(self, *_): ...


def run(cases: int) -> Tally:
    """Try `cases` command lines, equally many of each script and kind."""
    tally = Tally("command lines", allowed={0, 2, 3})
    each = cases // (2 * (len(KINDS) + 1))
    with ExitStack() as stack:
        stack.enter_context(chdir(ROOT))
        stack.enter_context(patch.dict(sys.modules, {"torch": None}))
        stack.enter_context(patch.object(train, "only_writer", nullcontext))
        stack.enter_context(patch.object(train, "train", lambda *_: None))
        stack.enter_context(patch.object(sample, "Session", Stub))
        for function in ("print_samples", "take_turns", "score", "write_html"):
            stack.enter_context(patch.object(sample, function, Stub))

        def check(script: str, kind: str, number: int, argv: list[str]) -> None:
            result = call(COMMANDS[script], *argv)
            tally.add(f"{script}, {kind}", number, argv, result)
            if tally.is_sampled and can_be_passed_to_a_process(argv):
                tally.add(
                    f"{script}, in a process",
                    number,
                    argv,
                    check_in_subprocess(script, argv, result),
                )

        for script in COMMANDS:
            for kind, make in KINDS.items():
                for number in range(each):
                    check(script, kind, number, make(rng_of(kind, number), script))
            check_with_hypothesis(
                LINES, each, lambda words, s=script: check(s, "hypothesis", 0, START[s] + words)
            )
    return tally


def check_in_subprocess(script: str, argv: list[str], expected: Result) -> Result:
    """Run a command line in a subprocess, which must give the expected exit code and stderr.

    Accepted ones get --print-config or --help, so that they do not start.
    """
    if expected.code == 0 and not expected.out:
        argv = [*argv, "--print-config" if script == "train.py" else "--help"]
    result = call_in_subprocess(script, *argv)
    same = result.code == expected.code and result.err == expected.err
    assert same, (script, argv, result, expected)
    return result


if __name__ == "__main__":
    main(run, cases=10_000)
