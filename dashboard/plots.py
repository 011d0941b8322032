"""Pictures for TensorBoard: attention maps, and the loss by position in the context.

Each has a white background of its own, so it is readable in light and dark mode.

T characters
"""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = 10  # pixels per character
MAX_TICKS = 10  # on the y axis, at any scale
TITLE_HEIGHT, SCALE_WIDTH, MIN_WIDTH = 18, 92, 200  # pixels
BACKGROUND, FAINT, DARK = 255, 242, 0  # indices of PALETTE, from dark blue to white
STOPS = np.array([[13, 27, 62], [40, 94, 163], [139, 190, 219], [225, 238, 246], [255, 255, 255]])
PALETTE = np.stack(
    [np.interp(np.arange(256), [0, 90, 180, 240, 255], channel) for channel in STOPS.T], axis=1
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

    The size is that at which TensorBoard first shows a picture, so 32 characters are legible.
    """
    rows, columns = _labels(characters)
    margin, side = rows.width, len(weights) * CELL
    width = max(margin + side, MIN_WIDTH)
    page = Image.new("L", (width, TITLE_HEIGHT + side + columns.height), BACKGROUND)
    ImageDraw.Draw(page).text((2, 2), title, DARK, FONT)
    _draw_scale(page)
    page.paste(rows, (0, TITLE_HEIGHT))
    page.paste(Image.fromarray(_cells(weights)), (margin, TITLE_HEIGHT))
    page.paste(columns, (margin, TITLE_HEIGHT + side))
    return _with_palette(page)


def _draw_scale(page: Image.Image) -> None:
    """Draw the scale of the weights into the upper right corner: 0, 1/4 and 1."""
    draw = ImageDraw.Draw(page)
    left = page.width - SCALE_WIDTH
    for weight, label in ((0.0, "0"), (0.25, "1/4"), (1.0, "1")):
        shade = _cells(np.full((1, 1), weight))
        page.paste(Image.fromarray(shade), (left, 4))
        draw.text((left + CELL + 3, 2), label, DARK, FONT)
        left += CELL + 8 + math.ceil(FONT.getlength(label))


def curve(x: np.ndarray, y: np.ndarray, reference: float, title: str) -> Image.Image:
    """Plot `y` over `x` (from 1, logarithmic), with a dashed line at the height `reference`."""
    width, height, margin = 720, 400, 48
    x_max, y_max = x[-1], max(reference, *y) * 1.05
    page = Image.new("L", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(page)

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
    return _with_palette(page)


def _cells(weights: np.ndarray) -> np.ndarray:
    """Return the shades (T * CELL, T * CELL) of weights (T, T): by the square root, 1 is darkest.

    Keys after the query have the color of the background.
    """
    shades = FAINT - np.sqrt(np.clip(weights, 0, 1)) * (FAINT - DARK)
    shades = np.where(np.tri(len(weights), dtype=bool), shades, BACKGROUND)
    return np.kron(shades, np.ones((CELL, CELL))).astype(np.uint8)


def _labels(characters: str) -> tuple[Image.Image, Image.Image]:
    """Draw the labels on the left of a map and those below it, where long ones are rotated."""
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


def _with_palette(page: Image.Image) -> Image.Image:
    page.putpalette(PALETTE.round().astype(np.uint8).tobytes())
    return page
