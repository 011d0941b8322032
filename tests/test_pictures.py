"""The pictures: attention maps are those of the model, labelled with their characters, and large
enough to read.
"""

import numpy as np
import pytest
import torch

from configs.schema import ModelConfig
from dashboard import plots
from model.attention import KERNELS, LAYOUTS
from model.gpt import GPT

CONFIG = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_maps_are_what_the_layers_attend_by(layout, kernel):
    """With values that name their place, a layer's output before the output matrix is its map."""
    model = GPT(
        ModelConfig(**CONFIG, attention=layout, kernel=kernel, positions="rope", qk_norm=True), 7
    ).eval()
    ids, seen = torch.randint(7, (8,), generator=torch.Generator().manual_seed(1)), []
    for block in model.blocks:
        with torch.no_grad():
            block.attention.out_proj.weight.mul_(20)
        own = block.attention.kernel
        block.attention.kernel = lambda q, k, v, *rest, own=own: (
            seen.append(own(q, k, torch.eye(8).expand(1, 4, 8, 8), *rest)[0]) or own(q, k, v, *rest)
        )
    logits = model(ids[None])
    maps = model.attention_maps(ids)
    assert len(maps) == 2 and all(each.shape == (4, 8, 8) for each in maps)
    for ours, theirs in zip(maps, seen[:2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)
    assert torch.equal(model(ids[None]), logits)


def test_what_cannot_be_drawn_is_named():
    wanted = {
        "a": "a",
        "~": "~",
        "\n": "newline",
        "\t": "tab",
        " ": "space",
        "中": "U+4E2D",
        "\x1b": "U+001B",
    }
    wanted |= {"\u0301": "U+0301", "\u202e": "U+202E", "\U0001f600": "U+1F600", "\r": "U+000D"}
    assert {each: plots.name(each) for each in wanted} == wanted


def test_a_map_has_a_cell_for_each_pair_darker_for_more_weight_and_none_for_what_comes_later():
    weights = np.tril(np.full((3, 4, 4), 0.25))
    weights[1, 3] = [0.0, 1.0, 0.0, 0.0]
    page = plots.attention(weights, "a\nbc", "title")
    side = 4 * plots.CELL
    width, height = (page.width - plots.CELL) // 2, (page.height - 3 * plots.CELL) // 2
    margin = width - side - plots.CELL
    left, top = width + margin + plots.CELL, 3 * plots.CELL  # of head 2, beside head 1
    cells = np.array(page)[top : top + side, left : left + side][plots.CELL // 2 :: plots.CELL]
    cells = cells[:, plots.CELL // 2 :: plots.CELL]
    assert cells[3].tolist() == [plots.FAINT, plots.DARK, plots.FAINT, plots.FAINT]
    assert (cells[np.triu_indices(4, 1)] == plots.BACKGROUND).all() and 0 < cells[
        2, 0
    ] < plots.FAINT
    labels = np.array(page)[top : top + side, left - margin : left].reshape(4, plots.CELL, margin)
    widths = (
        (labels < plots.FAINT).any(axis=1).sum(axis=1)
    )  # columns of ink beside each row of cells
    assert widths[1] > 3 * max(widths[[0, 2, 3]]) and widths.min() > 0
    assert height > side and page.getpalette()[-3:] == [255, 255, 255]


def test_pictures_of_the_smallest_and_of_odd_sizes_are_drawn():
    for T, H in ((1, 1), (2, 5), (32, 7)):
        plots.attention(np.full((H, T, T), 1 / T), "x" * T, "t")
    for n in (1, 2, 3, 1000):
        assert plots.curve(1 + np.arange(n), np.linspace(5, 1, n), 4.0, "t").size == (720, 400)


def test_the_curve_falls_where_its_numbers_do():
    page = np.array(plots.curve(np.array([1, 2, 4]), np.array([4.0, 1.0, 1.0]), 4.0, ""))
    ink = [np.flatnonzero(page[48:352, x] < 60).mean() for x in (60, 500, 650)]
    assert ink[0] < ink[1] - 50 and ink[1] == pytest.approx(ink[2], abs=2)
