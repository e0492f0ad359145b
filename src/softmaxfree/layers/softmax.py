"""Softmax attention, exact: Vaswani et al., Attention Is All You Need, 2017."""

import math
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from .multihead import Layout, MultiHeadAttention, dropped_to_zero


class SoftmaxAttention(MultiHeadAttention):
    """Softmax attention, quadratic in the number of tokens."""

    linear: ClassVar[bool] = False
    equivariant: ClassVar[bool] = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return softmax_attention(q, k, v, layout.mask)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of scores (B, heads, N, L) over the keys that the mask (B, L) keeps.

    Dropped keys have weight 0, also where all are dropped.
    """
    if mask is None:
        return scores.softmax(-1)
    dropped = ~mask[:, None, None, :]
    return scores.masked_fill(dropped, -math.inf).softmax(-1).masked_fill(dropped, 0)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the keys that the mask (B, L) keeps; 0 where it keeps none.

    q is (B, heads, N, d), k and v are (B, heads, L, d).
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v)
    # Where nothing is kept, everything is: the values are 0, and so is the result.
    kept = mask | ~mask.any(-1, keepdim=True)
    return F.scaled_dot_product_attention(
        q, dropped_to_zero(k, mask), dropped_to_zero(v, mask), attn_mask=kept[:, None, None, :]
    )
