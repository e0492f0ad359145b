"""torch's counter of operations sees everything."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from softmaxfree import SoftmaxFreeAttention
from softmaxfree.ops.flops import fused_attention

from ..helpers import tokens


def counted(layer: SoftmaxFreeAttention, side: int, backward: bool) -> int:
    x = tokens(1, side * side, layer.dim).requires_grad_(backward)
    with FlopCounterMode(display=False) as counter:
        out = layer(x, (side, side))
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("side", "ratio"), [(16, 4), (24, 2)], ids=["m=16", "m=144"])
@pytest.mark.parametrize("inverse", ["auto", "damped"])
def test_every_product_is_counted(side: int, ratio: int, inverse: str) -> None:
    dim, heads, kernel = 32, 2, 3
    layer = SoftmaxFreeAttention(
        dim, heads, ratio=ratio, inverse=inverse, value_conv=kernel
    ).double()
    n, m, d = side**2, (side // ratio) ** 2, dim // heads
    products = 3 * n * dim**2  # projections
    products += heads * m * ratio**2 * d * d  # the sampler
    products += heads * m * m * (d + 2)  # A, with two more columns for the norms
    products += heads * n * m * (d + 2 + d + d)  # P, P^T V, and P times that
    products += n * kernel**2 * dim  # the convolution of the values
    if inverse == "damped":
        products += heads * (40 * m**3 + m * m * d)
    elif m <= 128:
        products += heads * (m**3 / 2 + m * m * d)
    else:
        products += heads * (m**3 / 6 + m * m * d)
    with torch.no_grad():
        got = counted(layer, side, backward=False) / 2
    assert got == pytest.approx(products, rel=1e-5)
    # A linear layer's backward pass takes twice its forward pass's; here some more.
    assert counted(layer, side, backward=True) > 2 * 2.5 * (
        3 * n * dim**2 + heads * n * m * (d + 2 + d + d)
    )


def test_fused_attention_is_counted() -> None:
    """By torch itself, or by the formula where it does not."""
    q, k, v = torch.randn(2, 3, 20, 8), torch.randn(2, 3, 30, 8), torch.randn(2, 3, 30, 8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    expected = 2 * 2 * 3 * 20 * 30 * (8 + 8)
    assert counter.get_total_flops() == expected
    assert fused_attention(q.shape, k.shape, v.shape) == expected
