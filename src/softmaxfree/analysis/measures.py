"""Numbers that tell how near to failing the factors of an attention are."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.attention import SoftmaxFreeAttention
from ..ops.inverse import add_ridge, check_inverse, eigenvalues
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
    bottleneck_norm: Tensor
    norm: Tensor
    residual: Tensor


def measures_of(attention: SoftmaxFreeAttention, factors: Factors) -> Measures:
    """What `LayerDiagnosis` tells, of the factors of a layer in float64."""
    a, x, z = factors.A, factors.A_inverse, factors.Z
    ridge = check_inverse(attention.inverse, attention.iters, attention.ridge)
    inverted = add_ridge(a, ridge)
    residual = inverted @ x @ inverted - inverted
    values = eigenvalues(a)
    return Measures(
        values,
        condition=_condition(values),
        ridged_condition=_condition(values + ridge),
        inverse_norm=largest_eigenvalue(x),
        middle_norm=largest_eigenvalue(z),
        bottleneck_norm=largest_eigenvalue(a @ z @ a),
        norm=spectral_norm(factors),
        residual=torch.linalg.matrix_norm(residual) / torch.linalg.matrix_norm(inverted),
    )


def _condition(values: Tensor) -> Tensor:
    return values.abs().amax(-1) / values.abs().amin(-1)


def largest_eigenvalue(matrices: Tensor) -> Tensor:
    """The spectral norm of symmetric matrices: (..., m, m) -> (...)."""
    return eigenvalues(matrices).abs().amax(-1)


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
