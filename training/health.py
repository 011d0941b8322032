"""Is this run healthy? Each check answers with plain words and one suggestion, or with nothing.

What was told is kept in the checkpoint, so that each is told once in a run, however often the run
is resumed. Whether the model fits the text is known before the first step, and said by
data/summary.py.
"""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

NOTICES = ("first loss", "exploding", "vanishing", "overfitting", "plateau", "dead heads")
LONG, SHORT = 100, 1e-5  # gradients that are in trouble; a healthy one is between 0.1 and 10 long
Notice = tuple[str, str]  # one of NOTICES, and what to say


def of_step(step: int, loss: float, norm: float, vocabulary: int) -> Iterator[Notice]:
    """After a step: its loss, and the length of its gradient before clipping."""
    guess = math.log(vocabulary)
    if step == 1 and loss > guess + 0.5:
        words = (
            f"the first loss is {loss:.2f}, far above ln({vocabulary}) = {guess:.2f}: sure of "
            f"itself, and wrong"
        )
        yield "first loss", f"{words}; try a longer train.warmup_iters"
    if norm > LONG:
        words = f"the gradient explodes: it was {norm:,.0f} long in step {step:,}"
        yield "exploding", f"{words}; try half of train.learning_rate"
    if norm < SHORT and loss > 0.1:
        words = (
            f"the gradient vanishes: it was {norm:.0e} long in step {step:,}, at a loss of "
            f"{loss:.2f}"
        )
        yield "vanishing", f"{words}; start again with half of train.learning_rate"


def of_losses(stale: int, best_step: int, known_at_best: float, known: float) -> Iterator[Notice]:
    """After an evaluation, the `stale`th since the best one; `known` is the loss on text that was
    trained on.
    """
    if stale >= 3 and known < known_at_best - 0.01:
        words = (
            f"while the training text has, from {known_at_best:.4f} to {known:.4f}: it is learnt "
            f"by heart"
        )
        yield (
            "overfitting",
            f"validation has not improved since step {best_step:,}, {words}; try more "
            f"model.dropout",
        )
    elif stale >= 3:
        words = (
            f"a plateau: neither validation nor the training text has improved since step "
            f"{best_step:,}"
        )
        yield "plateau", f"{words}; try half of train.learning_rate"


def of_maps(maps: Sequence[Tensor]) -> Iterator[Notice]:
    """Late in a run: heads that tell characters apart no more. `maps` are (H, T, T), layer by
    layer.
    """
    dead = [
        f"head {h} of layer {layer} {kind}"
        for layer, heads in enumerate(maps, 1)
        for h, kind in enumerate(map(idleness, heads), 1)
        if kind
    ]
    if dead:
        few = "; ".join(dead[:5]) + (f"; and {len(dead) - 5} more" if len(dead) > 5 else "")
        yield (
            "dead heads",
            f"heads that tell nothing apart: {few}; try fewer of them (model.n_head)",
        )


def idleness(weights: Tensor) -> str:
    """Whether a head's (T, T) attention is the same whatever it reads: even, or all on one place;
    empty if neither.
    """
    T = len(weights)
    if T < 4:
        return ""
    entropies = -(weights * weights.clamp_min(1e-30).log()).sum(-1)[
        1:
    ]  # of row t at most ln(t + 1)
    shares = entropies / (1 + weights.new_tensor(range(1, T))).log()
    if shares.mean() > 0.9995:
        return "attends to everything alike"
    place = weights[T // 2 :, : T // 2].mean(
        0
    )  # the later half of the rows, on the earlier half of the places
    return f"attends only to place {place.argmax() + 1}" if place.max() > 0.99 else ""


# a spike: a loss more than 6 standard deviations above the mean of those before it (OLMo, llm.c)
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
