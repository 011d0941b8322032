"""Stress tests: `python -m tests.stress.NAME [--full]` with kills, damage, cached_text or ranks.

Each module has a function `stress(full)`, which returns a line of results, or fails at the first
promise that is broken. tests/slow/test_stress.py runs the short forms.
"""

import sys
from collections.abc import Callable


def main(stress: Callable[[bool], str]) -> None:
    """Run a stress test from the command line and print its line of results."""
    assert sys.argv[1:] in ([], ["--full"]), "the only option is --full"
    print(stress("--full" in sys.argv))
