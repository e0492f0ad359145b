"""Exact attention with the Gaussian kernel: what SOFT and SOFT++ approximate (the appendix)."""

from typing import Any, ClassVar

from torch import Tensor

from ..ops.attention import gaussian_attention
from .multihead import Layout, MultiHeadAttention


class GaussianAttention(MultiHeadAttention):
    """Gaussian attention without landmarks, quadratic in the number of tokens.

    Args:
        dim, num_heads: Width of the tokens, and heads that divide it.
        normalize: Symmetric normalisation, as in SOFT++. Without it the spectral norm grows with
            the number of tokens, and training hardly converges.
        others: Of `MultiHeadAttention`.
    """

    linear: ClassVar[bool] = False
    equivariant: ClassVar[bool] = True

    def __init__(
        self, dim: int, num_heads: int = 8, *, normalize: bool = True, **others: Any
    ) -> None:
        super().__init__(dim, num_heads, **others)
        self.normalize = normalize

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        mask, query_mask = (
            None if kept is None else kept.unsqueeze(1) for kept in (layout.mask, layout.query_mask)
        )
        return gaussian_attention(q, k, v, self.normalize, mask, query_mask)
