"""Stacks (..., m, m) of symmetric matrices."""

import torch
from torch import Tensor

from .precision import tiny

Ridge = float | Tensor
"""One number for all matrices, or (..., 1), one for each."""


def add_ridge(a: Tensor, ridge: Ridge) -> Tensor:
    """A + ridge I."""
    if torch.compiler.is_compiling():  # exporters do not support changes in place
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        return a + identity * (ridge.unsqueeze(-1) if isinstance(ridge, Tensor) else ridge)
    a = a.clone()
    a.diagonal(dim1=-2, dim2=-1).add_(ridge)
    return a


def row_sums(a: Tensor) -> Tensor:
    """|A|_1, the largest row sum of magnitudes: (..., 1, 1)."""
    return a.abs().sum(-1).amax(-1).clamp(min=tiny(a.dtype))[..., None, None]
