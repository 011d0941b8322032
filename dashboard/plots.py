"""Images of attention maps and of the loss by position, readable in light and dark mode.

H heads, T characters
"""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = 15  # pixels a character
PAPER, FAINT, INK = 255, 242, 0  # of a palette that runs from dark blue to white
STOPS = np.array([[13, 27, 62], [40, 94, 163], [139, 190, 219], [225, 238, 246], [255, 255, 255]])
PALETTE = np.stack(
    [np.interp(np.arange(256), [0, 90, 180, 240, 255], channel) for channel in STOPS.T], axis=1
)
FONT, LARGE = ImageFont.load_default(12), ImageFont.load_default(15)
NAMES = {"\n": "newline", "\t": "tab", " ": "space"}


def name(character: str) -> str:
    """Return a label for a character: itself, its name, or U+XXXX if the font cannot draw it."""
    missing = bytes(FONT.getmask("\U0010ffff"))
    drawn = character.isprintable() and bytes(FONT.getmask(character)) not in (missing, b"")
    return NAMES.get(character) or (character if drawn else f"U+{ord(character):04X}")


def attention(maps: np.ndarray, characters: str, title: str) -> Image.Image:
    """The maps (H, T, T) of a layer, head by head: row by row, who is read by the character before
    the row.
    """
    H, T = maps.shape[:2]
    rows, columns = _labels(characters)
    margin, side = rows.width, T * CELL
    across = math.ceil(math.sqrt(H))
    width, height = margin + side + CELL, side + margin + 2 * CELL
    page = Image.new("L", (across * width + CELL, math.ceil(H / across) * height + 3 * CELL), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((CELL, CELL // 2), title, INK, LARGE)
    for h, weights in enumerate(maps):
        left, top = h % across * width + margin + CELL, h // across * height + 3 * CELL
        draw.text((left, top - CELL), f"head {h + 1}", INK, FONT)
        page.paste(rows, (left - margin, top))
        page.paste(columns, (left, top + side))
        page.paste(Image.fromarray(_cells(weights)), (left, top))
    return _inked(page)


def curve(x: np.ndarray, y: np.ndarray, highest: float, title: str) -> Image.Image:
    """`y` from 0 to `highest` or above, over `x` from 1 on a logarithmic axis; what lies at
    `highest` is dashed.
    """
    width, height, margin = 720, 400, 48
    top = max(highest, *y) * 1.05
    page = Image.new("L", (width, height), PAPER)
    draw = ImageDraw.Draw(page)

    def at(x, y):
        across = np.log(x) / max(math.log(x_last), 1e-9)
        return margin + across * (width - 2 * margin), height - margin - y / top * (
            height - 2 * margin
        )

    x_last = x[-1]
    for tick in range(math.floor(top) + 1):
        draw.line([at(1, tick), at(x_last, tick)], FAINT - 12)
        draw.text((margin - 20, at(1, tick)[1] - 8), str(tick), INK, FONT)
    for tick in 2 ** np.arange(math.floor(math.log2(x_last)) + 1):
        draw.text((at(tick, 0)[0] - 4, height - margin + 6), str(tick), INK, FONT)
    for dash in np.linspace(margin, width - margin, 60):
        draw.line([(dash, at(1, highest)[1]), (dash + 5, at(1, highest)[1])], 140)
    draw.line(list(zip(*at(x, y), strict=True)), INK, 2)
    draw.text((margin, 12), title, INK, LARGE)
    return _inked(page)


def _cells(weights: np.ndarray) -> np.ndarray:
    """(T, T) weights -> (T * CELL, T * CELL) shades, darker by the square root; what is still to
    come stays paper.
    """
    shades = FAINT - np.sqrt(np.clip(weights, 0, 1)) * (FAINT - INK)
    shades = np.where(np.tri(len(weights), dtype=bool), shades, PAPER)
    return np.kron(shades, np.ones((CELL, CELL))).astype(np.uint8)


def _labels(characters: str) -> tuple[Image.Image, Image.Image]:
    """The characters as a strip to the left of a map, and as one below it, where names stand
    upright.
    """
    names = [name(character) for character in characters]
    margin = 8 + max(math.ceil(FONT.getlength(each)) for each in names)
    rows = Image.new("L", (margin, len(names) * CELL), PAPER)
    below = Image.new("L", (len(names) * CELL, margin), PAPER)
    for i, each in enumerate(names):
        label = Image.new("L", (margin, CELL), PAPER)
        ImageDraw.Draw(label).text((margin - 4, CELL // 2), each, INK, FONT, anchor="rm")
        rows.paste(label, (0, i * CELL))
        if len(each) > 1:
            below.paste(label.rotate(90, expand=True), (i * CELL, 0))
        else:
            ImageDraw.Draw(below).text((i * CELL + CELL // 2, 4), each, INK, FONT, anchor="mt")
    return rows, below


def _inked(page: Image.Image) -> Image.Image:
    page.putpalette(PALETTE.round().astype(np.uint8).tobytes())
    return page
