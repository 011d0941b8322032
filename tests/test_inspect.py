"""What a model attends to: attention maps equal the weights of its kernels."""

import pytest
import torch

from configs.schema import ModelConfig
from model.attention import KERNELS, LAYOUTS
from model.gpt import GPT
from model.inspect import attention_maps
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
