"""Spatial reduction: keys and values of a coarser grid, PVT's. Wang et al., 2021, arXiv 2102.12122.

The paper calls it a special case of Linformer: the mixtures are a convolution.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .multihead import Layout, MultiHeadAttention
from .samplers import ConvSampler, Size, sample_grid
from .softmax import softmax_attention


class SpatialReductionAttention(MultiHeadAttention):
    """Softmax attention to the tokens of a grid that a strided convolution has made smaller.

    Args:
        dim, num_heads: Width of the tokens, and heads that divide it.
        ratio: Kernel and stride of the convolution; 1 for none, if `num_landmarks` is not given.
        num_landmarks: Average its output to this many tokens at every size, so that cost is linear.
        pad: `replicate` or `drop`, what becomes of sides that the ratio does not divide.
        others: Of `MultiHeadAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        ratio: int = 8,
        num_landmarks: int | None = None,
        tie_qk: bool = False,
        pad: str = "replicate",
        **others: Any,
    ) -> None:
        super().__init__(dim, num_heads, tie_qk=tie_qk, **others)
        self.reduction: _Reduction | None = None
        if ratio != 1 or num_landmarks is not None:
            self.reduction = _Reduction(dim, self.ndim, ratio, num_landmarks, pad)
            self.reduction_bias = nn.Parameter(torch.zeros(dim))
            self.reduction_norm = nn.LayerNorm(dim)

    def reduce(
        self, source: Tensor, size: Size, mask: Tensor | None
    ) -> tuple[Tensor, Size, Tensor | None]:
        if self.reduction is None:
            return source, size, mask
        reduced, kept = sample_grid(
            self.reduction, source.unsqueeze(1), size, mask, self.prefix_tokens
        )
        grid = self.reduction.grid(size)
        if self.reduction.num_landmarks is not None:
            grid = self.reduction.bins(grid)
        bias = self.reduction_bias.expand(reduced.shape[-2] - self.prefix_tokens, -1)
        bias = nn.functional.pad(bias, (0, 0, self.prefix_tokens, 0))
        return self.reduction_norm(reduced.squeeze(1) + bias), grid, kept

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return softmax_attention(q, k, v, layout.mask)


class _Reduction(ConvSampler):
    """The convolution of all channels, which may have many more weights than there are tokens."""

    def convolve(self, windows: Tensor) -> Tensor:
        """(..., m, kernel tokens, dim) -> (..., m, dim), with the windows in the weights' order."""
        weight = self.weight.flatten(1).to(windows.dtype)
        return nn.functional.linear(windows.transpose(-1, -2).flatten(-2), weight)
