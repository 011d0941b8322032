"""Pictures: attention maps equal those of the model, and have labels."""

import numpy as np
import pytest
import torch

from configs.schema import ModelConfig
from model.attention import KERNELS, LAYOUTS
from model.gpt import GPT
from model.inspect import attention_maps
from storage import pictures
from tests.variants import noisy

CONFIG = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_maps_are_the_weights_that_the_kernels_apply(layout, kernel):
    """Call the kernels with the identity matrix as values, so that they return their weights."""
    model = noisy(GPT(ModelConfig(**CONFIG, layout=layout, kernel=kernel), 7)).eval()
    ids, recorded = torch.tensor([1, 5, 2, 2, 0, 6, 3, 4]), []
    for block in model.blocks:

        def record(q, k, v, *rest, kernel=block.attention.kernel):
            recorded.append(kernel(q, k, torch.eye(8).expand(1, 4, 8, 8), *rest)[0])
            return kernel(q, k, v, *rest)

        block.attention.kernel = record
    model(ids[None])
    torch.testing.assert_close(attention_maps(model, ids), recorded[:2], atol=1e-5, rtol=0)


def test_characters_without_a_glyph_are_labelled_by_name_or_code_point():
    names = {"a": "a", "~": "~", "\n": "newline", "\t": "tab", " ": "space", "中": "U+4E2D"}
    names |= {"\x1b": "U+001B", "\u0301": "U+0301", "\u202e": "U+202E", "\U0001f600": "U+1F600"}
    assert {character: pictures.label_of(character) for character in names} == names


def test_a_map_has_a_cell_per_query_and_key_darker_for_more_weight_and_blank_for_the_future():
    weights = np.tril(np.full((4, 4), 0.25))
    weights[3] = [0.0, 1.0, 0.0, 0.0]
    page = pictures.draw_attention_map(weights, "abcd", "title")
    side, top = 4 * pictures.CELL, pictures.TITLE_HEIGHT
    margin = page.height - side - top  # the labels below are as high as those on the left are wide
    square = np.array(page)[top : top + side, margin : margin + side]
    cells = square[pictures.CELL // 2 :: pictures.CELL, pictures.CELL // 2 :: pictures.CELL]
    assert cells[3].tolist() == [pictures.FAINT, pictures.DARK, pictures.FAINT, pictures.FAINT]
    assert (cells[np.triu_indices(4, 1)] == pictures.BACKGROUND).all()
    assert 0 < cells[2, 0] < pictures.FAINT
