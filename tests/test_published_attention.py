"""Outputs of attention that popular notebooks print, reproduced here where they are correct.

Seeds, sizes and numbers come from the notebooks; test_attention.py compares all other cases.

B batch, T queries, S keys, C n_embd, H heads, D head size
"""

import itertools
import math

import pytest
import torch

from model.attention import KERNELS, LAYOUTS, MultiHeadAttention, attention_weights

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def parse_table(table):
    return torch.tensor([float(number) for number in table.split()])


def matches(tensor, table):
    """Compare a tensor with a printed table of four decimals."""
    return torch.allclose(tensor.flatten(), parse_table(table), rtol=0, atol=6e-5)


@every_kernel
def test_one_head_gives_the_notebooks_numbers_with_seed_123(kernel):
    torch.manual_seed(123)
    q, k, v = (torch.randn(2, 1, 4, 8) for _ in range(3))  # one head; the same numbers as (2, 4, 8)
    out = kernel(q, k, v, None, True, 0.0)
    assert matches(
        v[0],
        """-0.2582 -2.0407 -0.8016 -0.8183 -1.1820 -0.2877 -0.6043  0.6002
           -1.4053 -0.5922 -0.2548  1.1517 -0.0179  0.4264 -0.7657 -0.0545
           -1.2743  0.4513 -0.2280  0.9224  0.2056 -0.4970  0.5821  0.2053
           -0.3018 -0.6703 -0.6171 -0.8334  0.4839 -0.1349  0.2119 -0.8714""",
    )
    assert matches(
        out[0],
        """-0.2582 -2.0407 -0.8016 -0.8183 -1.1820 -0.2877 -0.6043  0.6002
           -0.5085 -1.7247 -0.6823 -0.3885 -0.9280 -0.1319 -0.6395  0.4574
           -1.2056 -0.2033 -0.3026  0.8066 -0.0315 -0.1442 -0.0328  0.1576
           -0.8482 -0.1931 -0.4107  0.1548  0.2657 -0.2460  0.2601 -0.2675""",
    )
    assert matches(attention_weights(q, k, causal=True)[0, 0, 1, :2], "0.7818 0.2182")


def test_the_interleaved_layout_equals_reshape_permute_and_chunk():
    torch.manual_seed(0)
    x, projection = torch.randn(1, 4, 512), LAYOUTS["interleaved"](512, 8, 64, True)
    qkv = projection.qkv(x).reshape(1, 4, 8, 3 * 64).permute(0, 2, 1, 3)  # (B, H, T, 3D)
    for actual, expected in zip(projection.project(x), qkv.chunk(3, dim=-1), strict=True):
        assert actual.shape == (1, 8, 4, 64) and torch.equal(actual, expected)


@every_kernel
def test_attention_weights_equal_the_notebooks_softmax(kernel):
    scores = """-0.0130 -inf    -inf    -inf
                 0.3671  0.0984 -inf    -inf
                -0.2136 -0.2891 -0.1903 -inf
                 0.1682 -0.1799  0.3249  0.1746"""
    weights = """1.0000 0.0000 0.0000 0.0000
                 0.5668 0.4332 0.0000 0.0000
                 0.3389 0.3142 0.3469 0.0000
                 0.2576 0.1819 0.3013 0.2592"""
    identity = torch.eye(4).expand(1, 1, 4, 4)
    # q k^T / sqrt(4) equals the scores
    q = 2 * parse_table(scores).nan_to_num(neginf=7.0).view(1, 1, 4, 4)
    mask = torch.full((1, 1, 4, 4), -math.inf).triu(1)
    assert matches(kernel(q, identity, identity, mask, False, 0.0), weights)
    assert matches(kernel(q, identity, identity, None, True, 0.0), weights)


@every_layout
def test_the_projection_gives_the_notebooks_numbers_with_seed_0(layout):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3)
    torch.manual_seed(0)
    w_Q = torch.empty(3, 2, 2).uniform_(-((1 / 3) ** 0.5), (1 / 3) ** 0.5)  # (C, H, D)
    assert matches(
        w_Q.flatten(1),
        """-0.0043 0.3097 -0.4752 -0.4249
           -0.2224 0.1548 -0.0114  0.4578
           -0.0512 0.1528 -0.1745 -0.1135""",
    )
    projection = LAYOUTS[layout](3, 2, 2, False)
    with torch.no_grad():
        for h in range(2):
            projection.head_weights(h)[0].copy_(w_Q[:, h].T)
    q = projection.project(x)[0]
    assert matches(
        q,
        """ 0.2740 -0.5654 -0.2223  0.1027  0.4552 -0.3761 -0.0882 -0.2900 -0.2684  0.2068
            0.5919 -0.0207  0.0757  0.4943  0.1181 -0.8706  0.5426  0.6620 -0.0461  0.5319
            0.1353 -0.1247 -0.0756 -0.0470  0.3052 -0.4492 -0.1609  0.0467 -0.2345  0.4489
            0.0545 -0.2370  0.1546  0.2732  0.3603 -0.1699  0.0901  0.4391 -0.4326 -0.0442""",
    )


@pytest.mark.parametrize("layout, kernel", list(itertools.product(LAYOUTS, KERNELS)))
def test_a_mask_of_minus_1e9_equals_minus_infinity_except_for_fully_masked_queries(layout, kernel):
    torch.manual_seed(0)
    layer = MultiHeadAttention(18, 3, layout=layout, kernel=kernel, bias=True).double()
    q, k, v = (torch.rand(3, length, 18, dtype=torch.float64) for length in (10, 9, 9))
    mask = torch.rand(3, 10, 9) < 0.5
    mask[..., 0], mask[0, 2] = True, False
    by_number = layer(q, k, v, mask=torch.zeros(3, 10, 9).masked_fill(~mask, -1e9))
    by_infinity = layer(q, k, v, mask=mask)
    differs = (by_number != by_infinity).any(-1)
    assert differs.nonzero().tolist() == [[0, 2]]  # -1e9 gives the mean of all values
    assert torch.equal(by_infinity[0, 2], layer.out_proj.bias)
