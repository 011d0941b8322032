"""The KV cache: it stores keys and values in order, rejects mismatched ones, and lets a text be
processed in chunks.
"""

import itertools

import pytest
import torch

from configs.schema import ModelConfig
from model.attention import KERNELS, LAYOUTS
from model.gpt import GPT
from model.kv_cache import KVCache


def random_tensor(length, *, B=2, H=3, D=4, dtype=torch.float32, seed=0):
    return torch.randn(B, H, length, D, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_append_returns_everything_appended_so_far_in_order_and_allocates_once():
    cache, keys, values = KVCache(7), random_tensor(7), random_tensor(7, D=5, seed=1)
    addresses = set()
    for start, end in ((0, 3), (3, 4), (4, 7)):
        k, v = cache.append(keys[:, :, start:end], values[:, :, start:end])
        assert cache.length == end
        assert torch.equal(k, keys[:, :, :end]) and torch.equal(v, values[:, :, :end])
        addresses.add((k.data_ptr(), v.data_ptr()))
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (random_tensor(3), "6 tokens exceed the cache's capacity of 5"),
        (random_tensor(1, B=3), r"\(3, 3, 1, 4\) .* takes \(2, 3, 1, 4\)"),
        (random_tensor(1, H=1), r"\(2, 1, 1, 4\)"),
        (random_tensor(1, D=1), r"\(2, 3, 1, 1\)"),
        (random_tensor(1, dtype=torch.float64), "float64 .* takes .* torch.float32"),
        (random_tensor(1).to("meta"), "on meta; .* on cpu"),
    ],
)
def test_a_mismatched_tensor_is_rejected_and_leaves_the_cache_unchanged(tensor, message):
    cache, keys = KVCache(5), random_tensor(3)
    cache.append(keys, keys)
    with pytest.raises(ValueError, match=message):
        cache.append(tensor, tensor)
    k, _ = cache.append(random_tensor(1), random_tensor(1))
    assert cache.length == 4 and torch.equal(k[:, :, :3], keys)


@pytest.mark.parametrize(("layout", "kernel"), list(itertools.product(LAYOUTS, KERNELS)))
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_random_chunks_with_a_kv_cache_give_the_logits_of_one_forward_pass(
    layout, kernel, positions
):
    size = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12}
    size |= {"qk_norm": positions == "rope", "token_shifts": 5, "ngram_embeddings": 4}
    config = ModelConfig(attention=layout, kernel=kernel, positions=positions, **size)
    model = GPT(config, 11).double().eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(11, (3, 12), generator=generator)
    with torch.no_grad():
        whole = model(ids)
        for _ in range(5):
            caches, logits = model.new_caches(), []
            while (start := caches[0].length) < 12:
                end = start + int(torch.randint(1, 13 - start, (), generator=generator))
                logits.append(model(ids[:, :end], caches))
            assert torch.allclose(torch.cat(logits, dim=1), whole, rtol=0, atol=1e-12)
