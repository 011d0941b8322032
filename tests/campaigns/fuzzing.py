"""Helpers of the fuzzing campaigns: calls of a command in this process, checks and counts of its
results.

Each case comes from a random generator seeded with its kind and number, so it can be reproduced.
"""

import argparse
import io
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from tests.commands import exit_code
from tests.conftest import ROOT

BIDIRECTIONAL = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
CONTROLS = [chr(c) for c in (*range(32), *range(127, 160), 0x2028, 0x2029, *BIDIRECTIONAL)]
LONGEST = 1500  # characters on stderr
WITHOUT_TORCH = """\
import runpy, sys
sys.modules["torch"] = None  # importing it raises ImportError
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PLAUSIBLE = [
    "0", "0.1", "0.5", "1", "2", "4", "6.0", "8", "64", "1e-3", "1e3", "2000", "true", "false",
    "auto",
]  # fmt: skip
AWKWARD = [
    "", " ", "-1", "010", "1:30", "on", "Yes", "null", "~", "None", ".nan", "-.inf", "1e400",
    "0x10", "1_000", "６", "9" * 50, "9" * 5000, "[a, b]", "[", "]", "{a: 1}", "{", "*a", "&a x",
    "!!int 1", "!x", "'", '"', "a=b", "=", "--", "-", "#", " #x", ": ", ":", "%", "@", "`", "|",
    ">", "?", ",", "\\", "\t", "\n", "\r", "\0", "\x1b[2J", "\x9b", "\x85", "\u2028", "\u202e",
    "\ufeff", "\ufffe", "é", "e\u0301", "🙂", "👨‍👩‍👧", '"\\UFFFFFFFF"', "\ud800", "2024-13-45",
    "..", "/", "/dev/null", "~root", "$HOME", "%s", "{0}", "x" * 300,
]  # fmt: skip


def likely_value(rng: random.Random, field: Field) -> str:
    """Choose a value for a setting: mostly its default or a choice, sometimes an invalid one."""
    default = (
        str(field.default).lower() if isinstance(field.default, (bool, int, float, str)) else "x"
    )
    valid = [default, *field.metadata["choices"]]
    return rng.choice(rng.choices([valid, PLAUSIBLE, AWKWARD], weights=[16, 3, 1])[0])


@dataclass(frozen=True)
class Result:
    """The exit code and output of a command, and its duration in seconds."""

    code: int
    out: str
    err: str
    seconds: float = 0.0


def call(main: Callable[[list[str]], int], *argv: str) -> Result:
    """Run a command in this process with empty stdin; a traceback gives exit code 1."""
    stdin, out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(3)
    )
    start_time = time.perf_counter()
    with patch.multiple(sys, argv=["command", *argv], stdin=stdin, stdout=out, stderr=err):
        code = exit_code(main, list(argv))
    seconds = time.perf_counter() - start_time
    return Result(code, *(_content(each) for each in (out, err)), seconds)


def _content(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()


def call_in_subprocess(script: str, *argv: str, torch: bool = False) -> Result:
    """Run a command in a subprocess, in which importing torch is an error unless `torch`."""
    before = [] if torch else ["-c", WITHOUT_TORCH]
    command = [sys.executable, *before, script, *argv]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=300
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def can_be_passed_to_a_process(argv: Collection[str]) -> bool:
    """Return whether a process can get these arguments: no NUL, all characters encodable."""
    try:
        return b"\0" not in b"".join(map(os.fsencode, argv))
    except UnicodeEncodeError:
        return False


class Tally:
    """Counts of results by kind of case and exit code. An invalid result raises AssertionError.

    A refusal has at most `max_errors` lines. `is_sampled` is true for one case in a hundred, to be
    run in a subprocess too, which is slow.
    """

    def __init__(self, name: str, allowed: Collection[int], max_errors: int = 1):
        self.name, self.allowed, self.max_errors = name, allowed, max_errors
        self.counts = Counter()
        self.slowest = (0.0, "none")
        self.start_time = time.monotonic()

    def add(self, kind: str, number: int, case: object, result: Result) -> None:
        error = self._error(result)
        assert not error, f"{kind} {number}: {error}\n{case!r}\n{result}"
        self.counts[kind, result.code] += 1
        self.slowest = max(self.slowest, (result.seconds, f"{kind} {number}"))

    def _error(self, result: Result) -> str:
        """Return the reason why a result is invalid, or an empty string."""
        output, err = result.out + result.err, result.err
        if result.code not in self.allowed:
            return f"exit code {result.code}"
        if not {*output}.isdisjoint({*CONTROLS} - {"\n", "\t"}):
            return "a control character"
        lines = re.fullmatch("(error: [^\n]+\n)+", err) and err.count("\n")
        if result.code and not (lines and lines <= self.max_errors):
            return f"not one error line, or at most {self.max_errors}"
        if len(err) > LONGEST:
            return "more than 1,500 characters"
        if result.code == 2 and result.out:
            return "output before the error"
        return ""

    @property
    def is_sampled(self) -> bool:
        return self.counts.total() % 100 == 1

    def __str__(self) -> str:
        codes = sorted({code for _, code in self.counts})
        seconds = time.monotonic() - self.start_time
        lines = [f"{self.name}: {self.counts.total():,} cases in {seconds:,.0f} s, all valid"]
        lines.append(f"{'exit code':<24}" + "".join(f"{code:>8}" for code in codes))
        for kind in dict.fromkeys(kind for kind, _ in self.counts):
            lines.append(
                f"{kind:<24}" + "".join(f"{self.counts[kind, code]:>8,}" for code in codes)
            )
        seconds, case = self.slowest
        return "\n".join([*lines, f"slowest: {seconds:.3f} s ({case})"] if seconds else lines)


def rng_of(kind: str, number: int) -> random.Random:
    """Return the random generator of a case."""
    return random.Random(f"{kind} {number}")


def check_with_hypothesis(
    strategy: SearchStrategy, cases: int, check: Callable[[object], None]
) -> None:
    """Call `check` with about `cases` examples of `strategy`; hypothesis shrinks a failing one."""

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
    """Run a campaign from the command line: `--cases N`, by default the number of the full form."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=cases)
    print(run(parser.parse_args().cases))
