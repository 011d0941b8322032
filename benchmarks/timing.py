"""Interleaved timing: alternatives run in the same rounds, so a busy machine slows all of them."""

import statistics
import time
from collections.abc import Callable


def time_interleaved(
    setups: dict[str, Callable[[], Callable]], repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of each alternative in each repeat: all run once, then all again.

    A setup is called before the clock starts and returns the call to time.
    """
    seconds = {name: [] for name in setups}
    for _ in range(repeats):
        for name, setup in setups.items():
            call = setup()
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Divide the figures of one alternative by another's, repeat by repeat."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Return the median of `ratios`."""
    return statistics.median(ratios(numerators, denominators))
