"""Condition numbers, norms and residuals of the factors of an attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.attention import SoftmaxFreeAttention
from ..ops.matrices import add_ridge, eigenvalues
from ..ops.precision import tiny
from .factors import Factors


class Measures(NamedTuple):
    """The fields of `LayerDiagnosis` for every image and head, (B, heads), in float64."""

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
    """Measures the factors of a layer, given in float64."""
    a, x, z = factors.A, factors.A_inverse, factors.Z
    ridge = attention.inversion.ridge
    inverted = add_ridge(a, ridge)
    residual = inverted @ x @ inverted - inverted
    values = eigenvalues(a)
    return Measures(
        values,
        condition=_condition(values),
        ridged_condition=_condition(values + ridge),
        inverse_norm=largest_eigenvalue(x),
        middle_norm=largest_eigenvalue(z),
        landmark_attention_norm=largest_eigenvalue(a @ z @ a),
        norm=spectral_norm(factors),
        residual=torch.linalg.matrix_norm(residual) / torch.linalg.matrix_norm(inverted),
    )


def _condition(values: Tensor) -> Tensor:
    return values.abs().amax(-1) / values.abs().amin(-1)


def largest_eigenvalue(matrices: Tensor) -> Tensor:
    """The spectral norm of symmetric matrices: (..., m, m) -> (...)."""
    return eigenvalues(matrices).abs().amax(-1)


def spectral_norm(factors: Factors, steps: int = 50, tolerance: float = 1e-5) -> Tensor:
    """Computes |S| of every image and head, (B, heads), by power iteration on S^T S.

    It starts from equal entries, which are near the leading singular vector, as entries of S are
    hardly ever negative.
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
