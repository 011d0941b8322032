"""Pictures for TensorBoard: attention maps, and the loss by position in the context.

Each has a white background, so it is readable in both light and dark mode. In the shapes, T is the
number of characters.
"""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = 10  # pixels per character
MAX_TICKS = 10  # on the y axis, at any scale
TITLE_HEIGHT, SCALE_WIDTH, MIN_WIDTH = 18, 92, 200  # pixels
BACKGROUND, FAINT, DARK = 255, 242, 0  # indices of PALETTE, from dark blue to white
COLOR_STOPS = np.array(
    [[13, 27, 62], [40, 94, 163], [139, 190, 219], [225, 238, 246], [255, 255, 255]]
)
PALETTE = np.stack(
    [np.interp(np.arange(256), [0, 90, 180, 240, 255], channel) for channel in COLOR_STOPS.T],
    axis=1,
)
SMALL, FONT, LARGE = (ImageFont.load_default(size) for size in (10, 12, 15))
NAMES = {"\n": "newline", "\t": "tab", " ": "space"}
SYMBOLS = {"\n": "\\n", "\t": "\\t", " ": "_"}  # labels beside a map


def name(character: str) -> str:
    """Return the label of a character: itself, its name, or U+XXXX if the font lacks it."""
    missing = bytes(FONT.getmask("\U0010ffff"))
    drawn = character.isprintable() and bytes(FONT.getmask(character)) not in (missing, b"")
    return NAMES.get(character) or (character if drawn else f"U+{ord(character):04X}")


def attention(weights: np.ndarray, characters: str, title: str) -> Image.Image:
    """Draw the attention weights (T, T) of a head: a row is a query, its cells are the keys.

    The map of 32 characters has the size at which TensorBoard first shows a picture, so that its
    labels are legible without a click.
    """
    rows, columns = _labels(characters)
    margin, side = rows.width, len(weights) * CELL
    width = max(margin + side, MIN_WIDTH)
    canvas = Image.new("L", (width, TITLE_HEIGHT + side + columns.height), BACKGROUND)
    ImageDraw.Draw(canvas).text((2, 2), title, DARK, FONT)
    _draw_scale(canvas)
    canvas.paste(rows, (0, TITLE_HEIGHT))
    canvas.paste(Image.fromarray(_cells(weights)), (margin, TITLE_HEIGHT))
    canvas.paste(columns, (margin, TITLE_HEIGHT + side))
    return _with_palette(canvas)


def _draw_scale(canvas: Image.Image) -> None:
    """Draw the scale of the weights into the upper right corner: 0, 1/4 and 1."""
    draw = ImageDraw.Draw(canvas)
    left = canvas.width - SCALE_WIDTH
    for weight, label in ((0.0, "0"), (0.25, "1/4"), (1.0, "1")):
        shade = _cells(np.full((1, 1), weight))
        canvas.paste(Image.fromarray(shade), (left, 4))
        draw.text((left + CELL + 3, 2), label, DARK, FONT)
        left += CELL + 8 + math.ceil(FONT.getlength(label))


def curve(x: np.ndarray, y: np.ndarray, reference: float, title: str) -> Image.Image:
    """Plot `y` against `x`, on a log scale from 1, and a dashed horizontal line at `reference`."""
    width, height, margin = 720, 400, 48
    x_max, y_max = x[-1], max(reference, *y) * 1.05
    canvas = Image.new("L", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(canvas)

    def pixel(x, y):
        fraction = np.log(x) / max(math.log(x_max), 1e-9)
        column = margin + fraction * (width - 2 * margin)
        row = height - margin - y / y_max * (height - 2 * margin)
        return column, row

    for tick in range(0, math.floor(y_max) + 1, max(1, math.ceil(y_max / MAX_TICKS))):
        draw.line([pixel(1, tick), pixel(x_max, tick)], FAINT - 12)
        draw.text((margin - 20, pixel(1, tick)[1] - 8), str(tick), DARK, FONT)
    for tick in 2 ** np.arange(math.floor(math.log2(x_max)) + 1):
        draw.text((pixel(tick, 0)[0] - 4, height - margin + 6), str(tick), DARK, FONT)
    row = pixel(1, reference)[1]
    for dash in np.linspace(margin, width - margin, 60):
        draw.line([(dash, row), (dash + 5, row)], 140)
    draw.line(list(zip(*pixel(x, y), strict=True)), DARK, 2)
    draw.text((margin, 12), title, DARK, LARGE)
    return _with_palette(canvas)


def _cells(weights: np.ndarray) -> np.ndarray:
    """Return the shades (T * CELL, T * CELL) of the cells for weights (T, T).

    The darkness of a cell is proportional to the square root of its weight. Keys after the query
    have the color of the background.
    """
    shades = FAINT - np.sqrt(np.clip(weights, 0, 1)) * (FAINT - DARK)
    shades = np.where(np.tri(len(weights), dtype=bool), shades, BACKGROUND)
    return np.kron(shades, np.ones((CELL, CELL))).astype(np.uint8)


def _labels(characters: str) -> tuple[Image.Image, Image.Image]:
    """Draw the labels to the left of a map and those below it, with long ones rotated."""
    names = [SYMBOLS.get(character, name(character)) for character in characters]
    margin = 6 + max(8, *(math.ceil(SMALL.getlength(each)) for each in names))
    rows = Image.new("L", (margin, len(names) * CELL), BACKGROUND)
    below = Image.new("L", (len(names) * CELL, margin), BACKGROUND)
    for i, each in enumerate(names):
        label = Image.new("L", (margin, CELL), BACKGROUND)
        ImageDraw.Draw(label).text((margin - 3, CELL // 2), each, DARK, SMALL, anchor="rm")
        rows.paste(label, (0, i * CELL))
        if SMALL.getlength(each) > CELL:
            below.paste(label.rotate(90, expand=True), (i * CELL, 0))
        else:
            ImageDraw.Draw(below).text((i * CELL + CELL // 2, 10), each, DARK, SMALL, anchor="ms")
    return rows, below


def _with_palette(canvas: Image.Image) -> Image.Image:
    canvas.putpalette(PALETTE.round().astype(np.uint8).tobytes())
    return canvas
