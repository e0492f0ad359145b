"""Attentions to compare with, behind the signature of `SoftmaxFreeAttention`."""

import torch.nn.functional as F
from torch import Tensor

from ..ops.attention import gaussian_attention
from .multihead import MultiHeadAttention
from .samplers import Size


class SoftmaxAttention(MultiHeadAttention):
    """Softmax attention, quadratic in the number of tokens."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, size: Size, context_size: Size, mask: Tensor | None
    ) -> Tensor:
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v)
        dropped = ~mask[:, None, :, None]
        k, v = k.masked_fill(dropped, 0), v.masked_fill(dropped, 0)
        # Where nothing is kept, everything is: the values are 0, and so is the result.
        kept = mask | ~mask.any(-1, keepdim=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kept[:, None, None, :])


class GaussianAttention(MultiHeadAttention):
    """Exact attention with the Gaussian kernel, symmetrically normalised, at quadratic cost."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, size: Size, context_size: Size, mask: Tensor | None
    ) -> Tensor:
        mask = None if mask is None else mask.unsqueeze(1)
        return gaussian_attention(q, k, v, normalize=True, mask=mask)
