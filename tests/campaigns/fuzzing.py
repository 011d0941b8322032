"""What the fuzzing campaigns share: a command called in this process, what it may answer, and the
count of its answers.

A case is made by a generator of chance seeded with its kind and number, so that one that fails can
be made again.
"""

import argparse
import io
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from common.errors import run_command
from tests.conftest import ROOT

BIDIRECTIONAL = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
CONTROLS = [chr(c) for c in (*range(32), *range(127, 160), 0x2028, 0x2029, *BIDIRECTIONAL)]
LONGEST = 1500  # characters of an answer
WITHOUT_TORCH = """\
import runpy, sys
sys.modules["torch"] = None  # to import it is an error now
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PLAUSIBLE = [
    "0",
    "0.1",
    "0.5",
    "1",
    "2",
    "4",
    "6.0",
    "8",
    "64",
    "1e-3",
    "1e3",
    "2000",
    "true",
    "false",
    "auto",
]
AWKWARD = [
    "",
    " ",
    "-1",
    "010",
    "1:30",
    "on",
    "Yes",
    "null",
    "~",
    "None",
    ".nan",
    "-.inf",
    "1e400",
    "0x10",
    "1_000",
]
AWKWARD += [
    "６",
    "9" * 50,
    "9" * 5000,
    "[a, b]",
    "[",
    "]",
    "{a: 1}",
    "{",
    "*a",
    "&a x",
    "!!int 1",
    "!x",
    "'",
    '"',
]
AWKWARD += [
    "a=b",
    "=",
    "--",
    "-",
    "#",
    " #x",
    ": ",
    ":",
    "%",
    "@",
    "`",
    "|",
    ">",
    "?",
    ",",
    "\\",
    "\t",
    "\n",
    "\r",
]
AWKWARD += [
    "\0",
    "\x1b[2J",
    "\x9b",
    "\x85",
    "\u2028",
    "\u202e",
    "\ufeff",
    "\ufffe",
    "é",
    "e\u0301",
    "🙂",
    "👨‍👩‍👧",
]
AWKWARD += [
    '"\\UFFFFFFFF"',
    "\ud800",
    "2024-13-45",
    "..",
    "/",
    "/dev/null",
    "~root",
    "$HOME",
    "%s",
    "{0}",
    "x" * 300,
]


def likely_value(rng: random.Random, this: Field) -> str:
    """What somebody may write for a setting: mostly its default or one of its choices, and now and
    then nonsense.
    """
    default = (
        str(this.default).lower() if isinstance(this.default, (bool, int, float, str)) else "x"
    )
    right = [default, *this.metadata["choices"]]
    return rng.choice(rng.choices([right, PLAUSIBLE, AWKWARD], weights=[16, 3, 1])[0])


@dataclass(frozen=True)
class Answer:
    """What a command said, and how long it took, in seconds."""

    code: int
    out: str
    err: str
    seconds: float = 0.0


def call(main: Callable[[list[str]], int], *argv: str) -> Answer:
    """What a command answers, called in this process as its script does, with no input; a traceback
    is exit code 1.
    """
    stdin, out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(3)
    )
    began = time.perf_counter()
    with patch.multiple(sys, argv=["command", *argv], stdin=stdin, stdout=out, stderr=err):
        try:
            code = run_command(main)
        except Exception:
            code = traceback.print_exc() or 1
    seconds = time.perf_counter() - began
    return Answer(code, *(_written(each) for each in (out, err)), seconds)


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()


def real(script: str, *argv: str, torch: bool = False) -> Answer:
    """What the command answers in a process of its own, in which torch cannot be imported unless
    `torch`.
    """
    before = [] if torch else ["-c", WITHOUT_TORCH]
    command = [sys.executable, *before, script, *argv]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=300
    )
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


def can_be_real(argv: Collection[str]) -> bool:
    """Whether these arguments can be handed to a process: no NUL, and bytes for every character."""
    try:
        return b"\0" not in b"".join(map(os.fsencode, argv))
    except UnicodeEncodeError:
        return False


class Tally:
    """The answers counted, by kind of case and exit code. A broken promise ends the campaign with
    its case.

    One case in a hundred is `is_sampled`, to be tried as a real command too, which takes far
    longer.
    """

    def __init__(self, name: str, allowed: Collection[int]):
        self.name, self.allowed = name, allowed
        self.counts = Counter()
        self.slowest = (0.0, "none")
        self.began = time.monotonic()

    def add(self, kind: str, number: int, case: object, found: Answer) -> None:
        fault = self._fault(found)
        assert not fault, f"{kind} {number}: {fault}\n{case!r}\n{found}"
        self.counts[kind, found.code] += 1
        self.slowest = max(self.slowest, (found.seconds, f"{kind} {number}"))

    def _fault(self, found: Answer) -> str:
        """The promise that an answer breaks, if any."""
        said, err = found.out + found.err, found.err
        if found.code not in self.allowed:
            return f"exit code {found.code}"
        if not {*said}.isdisjoint({*CONTROLS} - {"\n", "\t"}):
            return "a control character"
        if found.code and not (
            err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
        ):
            return "not one line"
        if len(err) > LONGEST:
            return "more than one line's worth"
        if found.code == 2 and found.out:
            return "something was done before the mistake was found"
        return ""

    @property
    def is_sampled(self) -> bool:
        return self.counts.total() % 100 == 1

    def __str__(self) -> str:
        codes = sorted({code for _, code in self.counts})
        seconds = time.monotonic() - self.began
        lines = [
            f"{self.name}: {self.counts.total():,} cases in {seconds:,.0f} s, no promise broken"
        ]
        lines.append(f"{'exit code':<24}" + "".join(f"{code:>8}" for code in codes))
        for kind in dict.fromkeys(kind for kind, _ in self.counts):
            lines.append(
                f"{kind:<24}" + "".join(f"{self.counts[kind, code]:>8,}" for code in codes)
            )
        seconds, case = self.slowest
        return "\n".join([*lines, f"slowest: {seconds:.3f} s ({case})"] if seconds else lines)


def chance(kind: str, number: int) -> random.Random:
    """The chance that makes a case, and makes it again."""
    return random.Random(f"{kind} {number}")


def of_hypothesis(strategy: SearchStrategy, cases: int, check: Callable[[object], None]) -> None:
    """`check` what hypothesis makes of `strategy`, about `cases` times; one that fails is made as
    small as it goes.
    """

    @given(strategy)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def run(case):
        check(case)

    run()


def main(run: Callable[[int], Tally], cases: int) -> None:
    """The command line of a campaign: `--cases N`, of which the full form is the default."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=cases)
    print(run(parser.parse_args().cases))
