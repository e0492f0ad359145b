"""Skyformer: the Gaussian kernel, Nyström's method. Chen et al., 2021, arXiv 2111.00035.

The nearest relative of SOFT: landmarks are drawn from queries and keys instead of
learned, these have projections of their own, and nothing is normalised.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..ops.attention import landmark_attention
from ..ops.inverse import Inverse
from .multihead import Layout, MultiHeadAttention
from .samplers import RandomSampler, Sample, Size, join, pick


class SkyformerAttention(MultiHeadAttention):
    """Gaussian attention through a random subset of queries and keys.

    The subset is drawn anew at every training step and fixed in evaluation. The inverse is the
    one that the authors' iteration converges to.

    Args:
        dim, num_heads: Width of the tokens, and heads that divide it.
        ratio, num_landmarks: Set how many queries and keys are drawn together: as many as SOFT has
            landmarks on the queries' grid.
        ridge: Added to the diagonal of the matrix that is inverted.
        others: Of `MultiHeadAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        ratio: int = 8,
        num_landmarks: int | None = None,
        ridge: float = 1e-2,
        tie_qk: bool = False,
        pad: str = "replicate",
        **others: Any,
    ) -> None:
        super().__init__(dim, num_heads, tie_qk=tie_qk, **others)
        if ridge <= 0:
            raise UserError(f"ridge must be greater than 0, got {ridge}")
        self.ridge = ridge
        self.sampler = RandomSampler(self.head_dim, self.ndim, ratio, num_landmarks, pad)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        landmarks, landmark_mask = self.draw(q, k, layout)
        return landmark_attention(
            q,
            k,
            v,
            landmarks,
            Inverse.checked(ridge=self.ridge),
            normalize=False,
            mask=None if layout.mask is None else layout.mask.unsqueeze(1),
            landmark_mask=None if landmark_mask is None else landmark_mask.unsqueeze(1),
        )

    def draw(self, q: Tensor, k: Tensor, layout: Layout) -> Sample:
        """Draws landmarks from queries and keys; all prefix tokens are landmarks too."""
        q_prefix, q_grid = self._split(q, layout.query_mask)
        k_prefix, k_grid = self._split(k, layout.mask)
        tokens, kept = join(q_grid, k_grid)
        order = [self._order(layout.size, q.device), 1 - self._order(layout.context_size, q.device)]
        landmarks = pick(
            tokens,
            torch.cat(order),
            self.sampler.count(layout.size),
            self.sampler.kept_count(layout.size, q_grid[1]),
            kept,
        )
        return join(join(q_prefix, k_prefix), landmarks) if self.prefix_tokens else landmarks

    def _split(self, tokens: Tensor, mask: Tensor | None) -> tuple[Sample, Sample]:
        """The prefix and the grid."""
        k = self.prefix_tokens
        if mask is None:
            return (tokens[..., :k, :], None), (tokens[..., k:, :], None)
        return (tokens[..., :k, :], mask[:, :k]), (tokens[..., k:, :], mask[:, k:])

    def _order(self, size: Size, device: torch.device) -> Tensor:
        """(N,), between 0 and 1. In evaluation it is fixed: keys take the reverse of queries."""
        order = self.sampler.order(size, device)
        return order if self.training else order / 2**24
