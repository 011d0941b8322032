"""Loss curves of several runs: python -m benchmarks.compare RUN RUN ... [--out compare.png]

A table of exact validation losses, and a plot of the losses by seconds of training and by
characters trained on.
"""

import argparse
import itertools
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.runs import LossCurve, read_loss_curve

WIDTH, HEIGHT, MARGIN = 560, 420, 56  # pixels, of a panel
MAX_LOSS = 2.5  # nats; higher losses are not plotted
COLORS = ("#1f5fa8", "#c8641b", "#2b8a3e", "#9c36b5", "#c92a2a", "#495057")
FONT = ImageFont.load_default(13)


def print_table(curves: list[LossCurve]) -> None:
    """Print the length and the losses of each run."""
    print(f"{'run':<24}{'seconds':>10}{'characters':>14}{'last loss':>11}{'best loss':>11}")
    for curve in curves:
        row = f"{curve.seconds[-1]:>10,.1f}{curve.characters[-1]:>14,}"
        row += f"{curve.losses[-1]:>11.4f}{curve.losses.min():>11.4f}"
        print(f"{curve.name[:23]:<24}{row}")


def plot_panel(curves: list[LossCurve], x_axis: str, title: str) -> Image.Image:
    """Plot the losses by `x_axis`, "seconds" or "characters", which is logarithmic."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    x = np.concatenate([getattr(curve, x_axis) for curve in curves])
    left, right = math.log10(x[x > 0].min()), math.log10(x.max() * 1.05)
    losses = np.concatenate([curve.losses for curve in curves])
    low = math.floor(10 * losses.min()) / 10
    high = min(MAX_LOSS, math.ceil(10 * losses.max()) / 10)

    def pixel(x: float, loss: float) -> tuple[float, float]:
        across = (math.log10(x) - left) / (right - left)
        down = (high - loss) / (high - low)
        return MARGIN + across * (WIDTH - 2 * MARGIN), MARGIN + down * (HEIGHT - 2 * MARGIN)

    # grid and axis labels
    for loss in np.arange(round(10 * low), round(10 * high) + 1) / 10:
        start, end = pixel(10**left, loss), pixel(10**right, loss)
        draw.line([start, end], "#dddddd")
        draw.text((MARGIN - 30, start[1] - 8), f"{loss:.1f}", "black", FONT)
    for power in range(math.ceil(left), math.floor(right) + 1):
        start, end = pixel(10**power, low), pixel(10**power, high)
        draw.line([start, end], "#dddddd")
        label = (start[0], HEIGHT - MARGIN + 6)
        draw.text(label, f"{10**power:,}", "black", FONT, anchor="ma")

    # curves and legend
    for i, (curve, color) in enumerate(zip(curves, itertools.cycle(COLORS), strict=False)):
        x_of_curve = getattr(curve, x_axis)
        visible = (x_of_curve > 0) & (curve.losses <= high)
        points = list(map(pixel, x_of_curve[visible], curve.losses[visible]))
        draw.line(points, color, 2)
        for x, y in points:
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), color)
        draw.text((WIDTH - MARGIN, MARGIN + 16 * i), curve.name[:30], color, FONT, anchor="ra")
    draw.text((MARGIN, 16), title, "black", FONT)
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="file of the plot")
    options = parser.parse_args()
    curves = [read_loss_curve(folder) for folder in options.runs]
    print_table(curves)
    image = Image.new("RGB", (2 * WIDTH, HEIGHT), "white")
    by_seconds = "exact validation loss (nats per character) by seconds of training"
    image.paste(plot_panel(curves, "seconds", by_seconds), (0, 0))
    image.paste(plot_panel(curves, "characters", "by characters trained on"), (WIDTH, 0))
    image.save(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
