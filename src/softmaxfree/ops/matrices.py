"""Stacks (..., m, m) of symmetric matrices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ..errors import UserError
from .batching import is_readable
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


def eigenvalues(a: Tensor) -> Tensor:
    """(..., m), in ascending order; NaN if the matrix has NaN or infinity."""
    a, finite = _finite_or_zero(a)
    found = _found(torch.linalg.eigvalsh, a)
    values = _eigenvectors_by_svd(a)[0].sort(-1).values if found is None else found
    return torch.where(finite.squeeze(-1), values, torch.nan)


def eigenvectors(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., m), in any order, and eigenvectors (..., m, m), the columns.

    The values are NaN if the matrix has NaN or infinity.
    """
    a, finite = _finite_or_zero(a)
    values, vectors = _found(torch.linalg.eigh, a) or _eigenvectors_by_svd(a)
    return torch.where(finite.squeeze(-1), values, torch.nan), vectors


def _finite_or_zero(a: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices, with 0 for those that are not finite; and which are finite: (..., 1, 1)."""
    finite = a.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(finite, a, 0), finite


def _found(decompose: Callable[[Tensor], Any], a: Tensor) -> Any:
    """LAPACK's result; None if it does not converge, which it reports or shows by NaN."""
    try:
        found = decompose(a)
    except LinAlgError:
        return None
    parts = (found,) if isinstance(found, Tensor) else found
    is_sound = not is_readable(a) or all(part.isfinite().all() for part in parts)
    return found if is_sound else None


def _eigenvectors_by_svd(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors by the algorithm for singular values.

    It converges for matrices on which LAPACK's eigenvalues do not, such as some in float32 whose
    entries are 30 orders of magnitude apart.
    """
    try:
        left, values, right = torch.linalg.svd(a)
    except LinAlgError as error:
        raise UserError(
            f"the eigenvalues of a matrix were not found ({str(error).rstrip('.')}): choose an "
            "inverse that needs none, such as 'auto'"
        ) from error
    return values * (left * right.mT).sum(-2).sign(), left
