"""Pictures for TensorBoard: attention maps on a white background, readable in dark mode too.

H heads, T characters
"""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.tokenizer import character_name

CELL = 10  # pixels per character
GAP = 16  # pixels between two maps
TITLE_HEIGHT, SCALE_WIDTH, MIN_WIDTH = 18, 92, 200  # pixels
BACKGROUND, FAINT, DARK = 255, 242, 0  # indices of PALETTE, from dark blue to white
COLOR_STOPS = np.array(  # red, green, blue
    [[13, 27, 62], [40, 94, 163], [139, 190, 219], [225, 238, 246], [255, 255, 255]]
)
# each pixel is an index of this palette, interpolated between the stops
PALETTE = np.stack(
    [np.interp(np.arange(256), [0, 90, 180, 240, 255], channel) for channel in COLOR_STOPS.T],
    axis=1,
)
SMALL, FONT = (ImageFont.load_default(size) for size in (10, 12))
SYMBOLS = {"\n": "\\n", "\t": "\\t", " ": "_"}  # labels beside a map


def label_of(character: str) -> str:
    """Return the label of a character: its name, or U+XXXX if the font cannot draw it."""
    # render an unassigned code point to learn what a missing glyph looks like
    missing_glyph = bytes(FONT.getmask("\U0010ffff"))
    label = character_name(character)
    is_missing = label == character and bytes(FONT.getmask(character)) == missing_glyph
    return f"U+{ord(character):04X}" if is_missing else label


def draw_attention_maps(maps: np.ndarray, characters: str, layer: int) -> Image.Image:
    """Draw the attention weights (H, T, T) of all heads of a layer, in a grid.

    Side by side they show which head attends to the previous character, and which to the start of
    the word.
    """
    heads = [
        draw_attention_map(weights, characters, f"layer {layer}, head {head}")
        for head, weights in enumerate(maps, 1)
    ]
    # a grid as square as the number of heads allows: 4 in 2 columns, 12 in 4
    columns = math.ceil(math.sqrt(len(heads)))
    rows = math.ceil(len(heads) / columns)
    width, height = heads[0].width + GAP, heads[0].height + GAP
    page = Image.new("L", (columns * width - GAP, rows * height - GAP), BACKGROUND)
    page = _with_palette(page)
    for i, head in enumerate(heads):
        page.paste(head, (i % columns * width, i // columns * height))
    return page


def draw_attention_map(weights: np.ndarray, characters: str, title: str) -> Image.Image:
    """Draw the attention weights (T, T) of a head: a row is a query, its cells are the keys."""
    rows, columns = _labels(characters)
    margin, side = rows.width, len(weights) * CELL
    width = max(margin + side, MIN_WIDTH)  # a short text is narrower than the title
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


def _cells(weights: np.ndarray) -> np.ndarray:
    """Return the shades (T * CELL, T * CELL) of the cells for weights (T, T)."""
    # the square root keeps small weights visible: 1/16 is a quarter as dark as 1
    shades = FAINT - np.sqrt(np.clip(weights, 0, 1)) * (FAINT - DARK)
    shades = np.where(np.tri(len(weights), dtype=bool), shades, BACKGROUND)
    return np.kron(shades, np.ones((CELL, CELL))).astype(np.uint8)


def _labels(characters: str) -> tuple[Image.Image, Image.Image]:
    """Draw the labels to the left of a map and those below it."""
    # wide enough for the longest name, such as U+1F600
    labels = [SYMBOLS.get(character, label_of(character)) for character in characters]
    margin = 6 + max(8, *(math.ceil(SMALL.getlength(label)) for label in labels))
    rows = Image.new("L", (margin, len(labels) * CELL), BACKGROUND)
    below = Image.new("L", (len(labels) * CELL, margin), BACKGROUND)
    for i, label in enumerate(labels):
        drawn = Image.new("L", (margin, CELL), BACKGROUND)
        ImageDraw.Draw(drawn).text((margin - 3, CELL // 2), label, DARK, SMALL, anchor="rm")
        rows.paste(drawn, (0, i * CELL))
        # below the map, rotate labels that are wider than a cell
        if SMALL.getlength(label) > CELL:
            below.paste(drawn.rotate(90, expand=True), (i * CELL, 0))
        else:
            ImageDraw.Draw(below).text((i * CELL + CELL // 2, 10), label, DARK, SMALL, anchor="ms")
    return rows, below


def _with_palette(canvas: Image.Image) -> Image.Image:
    canvas.putpalette(PALETTE.round().astype(np.uint8).tobytes())
    return canvas
