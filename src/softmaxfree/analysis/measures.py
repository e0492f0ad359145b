"""Numbers that tell how near to failing the factors of an attention are."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.attention import SoftmaxFreeAttention
from ..ops.inverse import check_inverse
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
    norm: Tensor
    gain: Tensor
    residual: Tensor


def measures_of(attention: SoftmaxFreeAttention, factors: Factors, v: Tensor) -> Measures:
    a, x, values = factors.A, factors.A_inverse, v.to(factors.A)
    ridge = check_inverse(attention.inverse, attention.iters, attention.ridge)
    eigenvalues = _eigenvalues(a)
    return Measures(
        eigenvalues,
        _condition(eigenvalues),
        _condition(eigenvalues + ridge),
        _eigenvalues(x).abs().amax(-1),
        _eigenvalues(factors.Z).abs().amax(-1),
        spectral_norm(factors),
        _root_mean_square(factors.attend(values)) / _root_mean_square(values),
        torch.linalg.matrix_norm(a @ x @ a - a) / torch.linalg.matrix_norm(a),
    )


def _eigenvalues(matrices: Tensor) -> Tensor:
    """Of symmetric matrices (..., m, m), (..., m); NaN where one is not finite."""
    finite = matrices.isfinite().flatten(-2).all(-1, keepdim=True)
    values = torch.linalg.eigvalsh(torch.where(finite.unsqueeze(-1), matrices, 0))
    return torch.where(finite, values, torch.nan)


def _condition(eigenvalues: Tensor) -> Tensor:
    return eigenvalues.abs().amax(-1) / eigenvalues.abs().amin(-1)


def _root_mean_square(tokens: Tensor) -> Tensor:
    return tokens.square().mean((-2, -1)).sqrt().clamp(min=tiny(tokens.dtype))


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
