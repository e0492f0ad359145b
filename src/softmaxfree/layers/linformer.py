"""Linformer: keys and values projected along the sequence. Wang et al., 2020, arXiv 2006.04768."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .multihead import Layout, MultiHeadAttention, dropped_to_zero
from .samplers import Size, landmark_grid


class LinformerAttention(MultiHeadAttention):
    """Softmax attention to a fixed number of learned mixtures of all keys.

    The mixtures are learned for the tokens of one grid. A smaller grid, or a shorter sequence,
    uses the upper left part of their weights; a larger one is refused.

    Args:
        dim, num_heads: Width of the tokens, and heads that divide it.
        max_size: The largest grid, (N,) or (H, W).
        ratio, num_landmarks: Set the number of mixtures: that of landmarks that SOFT with its
            sampler `avg` would have on that grid.
        others: Of `MultiHeadAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        max_size: Sequence[int],
        ratio: int = 8,
        num_landmarks: int | None = None,
        tie_qk: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(dim, num_heads, tie_qk=tie_qk, **others)
        bins = landmark_grid(max_size, self.ndim, ratio, num_landmarks)
        self.max_size = tuple(max_size)
        places = self.prefix_tokens + math.prod(self.max_size)
        mixtures = self.prefix_tokens + math.prod(bins)
        self.mix_keys = nn.Parameter(torch.empty(mixtures, places))
        self.mix_values = nn.Parameter(torch.empty(mixtures, places))
        for weight in (self.mix_keys, self.mix_values):
            nn.init.uniform_(weight, -(mixtures**-0.5), mixtures**-0.5)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        k = self._mix(dropped_to_zero(k, layout.mask), self.mix_keys, layout.context_size)
        v = self._mix(dropped_to_zero(v, layout.mask), self.mix_values, layout.context_size)
        return F.scaled_dot_product_attention(q, k, v)

    def _mix(self, tokens: Tensor, weight: Tensor, size: Size) -> Tensor:
        """(B, heads, L, d) -> (B, heads, mixtures, d)."""
        if any(side > largest for side, largest in zip(size, self.max_size)):
            raise UserError(
                f"Linformer's projections are learned for at most {self.max_size} tokens, got "
                f"{size}; build it with a larger max_size (img_size of a model)"
            )
        if size != self.max_size:
            k = self.prefix_tokens
            grid = weight[:, k:].unflatten(1, self.max_size)
            for axis, side in enumerate(size, start=1):
                grid = grid.narrow(axis, 0, side)
            weight = torch.cat([weight[:, :k], grid.flatten(1)], 1)
        # All heads in one product: (B, dim, L) (L, mixtures).
        mixed = F.linear(tokens.transpose(1, 2).flatten(2).mT, weight)
        return mixed.unflatten(1, (self.num_heads, self.head_dim)).mT
