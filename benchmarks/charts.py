"""The style of every chart, on matplotlib: a white page, so that it is readable in dark mode too.

    with charts.picture("docs/loss.svg", height=3) as axes:
        axes.plot(steps, losses, color=charts.BLUE, label="validation")
        axes.legend()

The same figure gives the same file: it has no date, and its ids come from a fixed salt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; pip install -r requirements-dev.txt") from None
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

BLUE, RED, GREEN, GREY = "#285ea3", "#b5402a", "#2e7d4f", "#888888"
WIDTH = 6.25  # inches: 600 px at 96 px per inch
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hornbook",
}


@contextmanager
def picture(
    path: str | Path, height: float, rows: int = 1, columns: int = 1, **options: object
) -> Iterator[Axes]:
    """Yield the axes of a new figure of `height` inches (an array if several), then save it as SVG.

    `options` go to `Figure.subplots`.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
        yield figure.subplots(rows, columns, **options)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def log_x(axes: Axes, ticks: list[float]) -> None:
    """Make the x axis logarithmic, with plain numbers at these ticks."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def color_of(number: int, count: int) -> tuple[float, ...]:
    """Return the color of one of `count` things that have an order."""
    return matplotlib.colormaps["viridis"](0.85 * number / max(1, count - 1))
