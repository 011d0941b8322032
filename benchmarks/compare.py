"""Runs side by side: python -m benchmarks.compare RUN RUN ... [--out compare.png]

A table of their exact validation losses, and a drawing of the loss against seconds of training and
characters read.
"""

import argparse
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.runs import Course, course

WIDTH, HEIGHT, MARGIN = 560, 420, 56
COLOURS = ("#1f5fa8", "#c8641b", "#2b8a3e", "#9c36b5", "#c92a2a", "#495057")
FONT = ImageFont.load_default(13)


def table(courses: list[Course]) -> None:
    print(f"{'run':<24}{'seconds':>10}{'characters':>14}{'last loss':>11}{'best loss':>11}")
    for each in courses:
        row = f"{each.seconds[-1]:>10,.1f}{each.characters[-1]:>14,}"
        row += f"{each.losses[-1]:>11.4f}{each.losses.min():>11.4f}"
        print(f"{each.name[:23]:<24}{row}")


def panel(courses: list[Course], along: str, title: str) -> Image.Image:
    """The losses over `along`, an attribute of Course, on a logarithmic axis from 1 to 2.5 nats or
    what they span.
    """
    page = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(page)
    x_all = np.concatenate([getattr(each, along)[getattr(each, along) > 0] for each in courses])
    losses = np.concatenate([each.losses for each in courses])
    low, high = math.floor(10 * losses.min()) / 10, min(2.5, math.ceil(10 * losses.max()) / 10)
    left, right = math.log10(x_all.min()), math.log10(x_all.max() * 1.05)

    def at(x: float, loss: float) -> tuple[float, float]:
        across = (math.log10(x) - left) / (right - left)
        return MARGIN + across * (WIDTH - 2 * MARGIN), MARGIN + (high - loss) / (high - low) * (
            HEIGHT - 2 * MARGIN
        )

    for loss in np.arange(round(10 * low), round(10 * high) + 1) / 10:
        draw.line([at(10**left, loss), at(10**right, loss)], "#dddddd")
        draw.text((MARGIN - 30, at(10**left, loss)[1] - 8), f"{loss:.1f}", "black", FONT)
    for power in range(math.ceil(left), math.floor(right) + 1):
        draw.line([at(10**power, low), at(10**power, high)], "#dddddd")
        draw.text(
            (at(10**power, low)[0], HEIGHT - MARGIN + 6),
            f"{10**power:,}",
            "black",
            FONT,
            anchor="ma",
        )
    for i, (each, colour) in enumerate(zip(courses, COLOURS * len(courses), strict=False)):
        shown = (getattr(each, along) > 0) & (each.losses <= high)
        points = [
            at(x, loss)
            for x, loss in zip(getattr(each, along)[shown], each.losses[shown], strict=True)
        ]
        draw.line(points, colour, 2)
        for x, y in points:
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), colour)
        draw.text((WIDTH - MARGIN, MARGIN + 16 * i), each.name[:30], colour, FONT, anchor="ra")
    draw.text((MARGIN, 16), title, "black", FONT)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="the drawing")
    options = parser.parse_args()
    courses = [course(folder) for folder in options.runs]
    table(courses)
    page = Image.new("RGB", (2 * WIDTH, HEIGHT), "white")
    page.paste(
        panel(courses, "seconds", "exact validation loss (nats) over seconds of training"), (0, 0)
    )
    page.paste(panel(courses, "characters", "over characters read"), (WIDTH, 0))
    page.save(options.out)
    print(f"drawn in {options.out}")


if __name__ == "__main__":
    main()
