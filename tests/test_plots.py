"""Plots: attention maps equal those of the model, have labelled cells, and curves have the right
shape.
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
def test_attention_maps_are_the_weights_that_the_kernels_apply(layout, kernel):
    """Call the kernels with the identity matrix as values, so that they return their weights."""
    model = GPT(
        ModelConfig(**CONFIG, attention=layout, kernel=kernel, positions="rope", qk_norm=True), 7
    ).eval()
    ids, recorded = torch.randint(7, (8,), generator=torch.Generator().manual_seed(1)), []
    for block in model.blocks:
        with torch.no_grad():
            block.attention.out_proj.weight.mul_(20)
        original = block.attention.kernel
        block.attention.kernel = lambda q, k, v, *rest, original=original: (
            recorded.append(original(q, k, torch.eye(8).expand(1, 4, 8, 8), *rest)[0])
            or original(q, k, v, *rest)
        )
    logits = model(ids[None])
    maps = model.attention_maps(ids)
    assert len(maps) == 2 and all(each.shape == (4, 8, 8) for each in maps)
    for actual, expected in zip(maps, recorded[:2], strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)
    assert torch.equal(model(ids[None]), logits)


def test_characters_without_a_glyph_are_labelled_by_name_or_code_point():
    expected = {
        "a": "a",
        "~": "~",
        "\n": "newline",
        "\t": "tab",
        " ": "space",
        "中": "U+4E2D",
        "\x1b": "U+001B",
    }
    expected |= {"\u0301": "U+0301", "\u202e": "U+202E", "\U0001f600": "U+1F600", "\r": "U+000D"}
    assert {each: plots.name(each) for each in expected} == expected


def test_a_map_has_a_cell_per_query_and_key_darker_for_more_weight_and_blank_for_the_future():
    weights = np.tril(np.full((3, 4, 4), 0.25))
    weights[1, 3] = [0.0, 1.0, 0.0, 0.0]
    page = plots.attention(weights, "a\nbc", "title")
    side = 4 * plots.CELL
    width, height = (page.width - plots.CELL) // 2, (page.height - 3 * plots.CELL) // 2
    margin = width - side - plots.CELL
    left, top = width + margin + plots.CELL, 3 * plots.CELL  # head 2, to the right of head 1
    cells = np.array(page)[top : top + side, left : left + side][plots.CELL // 2 :: plots.CELL]
    cells = cells[:, plots.CELL // 2 :: plots.CELL]
    assert cells[3].tolist() == [plots.FAINT, plots.DARK, plots.FAINT, plots.FAINT]
    assert (cells[np.triu_indices(4, 1)] == plots.BACKGROUND).all() and 0 < cells[
        2, 0
    ] < plots.FAINT
    labels = np.array(page)[top : top + side, left - margin : left].reshape(4, plots.CELL, margin)
    widths = (labels < plots.FAINT).any(axis=1).sum(axis=1)  # width in pixels of each label
    assert widths[1] > 3 * max(widths[[0, 2, 3]]) and widths.min() > 0
    assert height > side and page.getpalette()[-3:] == [255, 255, 255]


def test_plots_of_extreme_sizes_are_drawn():
    for T, H in ((1, 1), (2, 5), (32, 7)):
        plots.attention(np.full((H, T, T), 1 / T), "x" * T, "t")
    for n in (1, 2, 3, 1000):
        assert plots.curve(1 + np.arange(n), np.linspace(5, 1, n), 4.0, "t").size == (720, 400)


def test_the_curve_follows_its_values():
    page = np.array(plots.curve(np.array([1, 2, 4]), np.array([4.0, 1.0, 1.0]), 4.0, ""))
    ink = [np.flatnonzero(page[48:352, x] < 60).mean() for x in (60, 500, 650)]
    assert ink[0] < ink[1] - 50 and ink[1] == pytest.approx(ink[2], abs=2)
