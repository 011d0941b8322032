"""A loss that stands out: more than 6 standard deviations above the mean of those before it (as
OLMo and llm.c do).
"""

import math

WINDOW, SIGMAS = 128, 6


def is_spike(loss: float, window: list[float]) -> bool:
    """Whether `loss` is far above the last WINDOW losses, which `window` must hold; before that
    nothing is.
    """
    if len(window) < WINDOW:
        return False
    mean = math.fsum(window) / WINDOW
    sigma = math.sqrt(math.fsum((each - mean) ** 2 for each in window) / WINDOW)
    return loss > mean + SIGMAS * sigma
