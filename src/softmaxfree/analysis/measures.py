"""Numbers that tell how near to failing the factors of an attention are."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.attention import SoftmaxFreeAttention
from ..ops.matrices import add_ridge
from ..ops.precision import tiny
from .factors import Factors


class Measures(NamedTuple):
    """Of every image and head, (B, heads), in float64."""

    eigenvalues: Tensor
    """(B, heads, m)."""
    condition: Tensor
    ridged_condition: Tensor
    inverse_norm: Tensor
    middle_norm: Tensor
    landmark_attention_norm: Tensor
    norm: Tensor
    residual: Tensor


def measures_of(attention: SoftmaxFreeAttention, factors: Factors) -> Measures:
    """What `LayerDiagnosis` tells, of the factors of a layer in float64."""
    a, x, z = factors.A, factors.A_inverse, factors.Z
    ridge = attention.inversion.ridge
    inverted = add_ridge(a, ridge)
    residual = inverted @ x @ inverted - inverted
    eigenvalues = _eigenvalues(a)
    return Measures(
        eigenvalues,
        condition=_condition(eigenvalues),
        ridged_condition=_condition(eigenvalues + ridge),
        inverse_norm=largest_eigenvalue(x),
        middle_norm=largest_eigenvalue(z),
        landmark_attention_norm=largest_eigenvalue(a @ z @ a),
        norm=spectral_norm(factors),
        residual=torch.linalg.matrix_norm(residual) / torch.linalg.matrix_norm(inverted),
    )


def _eigenvalues(matrices: Tensor) -> Tensor:
    """Of symmetric matrices (..., m, m), (..., m); NaN where one is not finite."""
    finite = matrices.isfinite().flatten(-2).all(-1, keepdim=True)
    values = torch.linalg.eigvalsh(torch.where(finite.unsqueeze(-1), matrices, 0))
    return torch.where(finite, values, torch.nan)


def _condition(eigenvalues: Tensor) -> Tensor:
    return eigenvalues.abs().amax(-1) / eigenvalues.abs().amin(-1)


def largest_eigenvalue(matrices: Tensor) -> Tensor:
    """The spectral norm of symmetric matrices: (..., m, m) -> (...)."""
    return _eigenvalues(matrices).abs().amax(-1)


def spectral_norm(factors: Factors, steps: int = 50, tolerance: float = 1e-5) -> Tensor:
    """|S| of every image and head, (B, heads), by power iteration through the factors.

    It starts from equal weights. Entries of S are hardly ever below 0, so that these are not far
    from what S stretches most.
    """
    p, p_keys, z = factors.P, factors.P_keys, factors.Z
    x = p_keys.new_ones(*p_keys.shape[:-1], 1)
    norm = x.new_zeros(x.shape[:2])
    for _ in range(steps):
        x = x / x.norm(dim=-2, keepdim=True).clamp(min=tiny(x.dtype))
        y = factors.attend(x)
        before, norm = norm, y.norm(dim=-2).squeeze(-1)
        if ((norm - before).abs() <= tolerance * norm).all():
            break
        x = p_keys @ (z.mT @ (p.mT @ y))
    return norm
