"""What is measured of an attention: what it passes, its rows, and its factors, if it has some."""

import torch
from torch import Tensor

from ..layers.attention import SoftmaxFreeAttention
from ..ops.matrices import add_ridge, eigenvalues
from ..ops.precision import tiny
from .attention_record import AttentionRecord
from .factors import Factors

MOST_QUERIES = 16
"""Rows that are looked at, evenly spread over the tokens."""

Measures = dict[str, Tensor]
"""Fields of `LayerDiagnosis` for every image and head, (B, heads), in float64; eigenvalues have one
more axis."""


def measures_of(record: AttentionRecord) -> Measures:
    """Measures a layer in float64; what an attention does not have is left out."""
    attention, count = record.attention, record.q.shape[-2]
    queries = torch.linspace(0, count - 1, min(count, MOST_QUERIES)).long().tolist()
    out = record.attend(record.q, record.k, record.v, record.layout)
    passes = _rms(out) / _rms(record.v).clamp(min=tiny(torch.float64))
    if not isinstance(attention, SoftmaxFreeAttention):
        return {"passes": passes, "unevenness": unevenness(record.rows(queries))}
    factors = record.factors().double()
    found = {
        "passes": passes,
        "unevenness": unevenness(factors.rows(queries)),
        "norm": spectral_norm(factors),
    }
    if factors.A is not None and factors.A_inverse is not None:
        found |= _of_inverse(factors.A, factors.A_inverse, attention.inversion.ridge)
        found["middle_norm"] = largest_eigenvalue(factors.Z)
        if not attention.rows:
            among_landmarks = factors.A @ factors.Z @ factors.A
            found["landmark_attention_norm"] = largest_eigenvalue(among_landmarks)
    return found


def _rms(tokens: Tensor) -> Tensor:
    """Root of the mean square over tokens and channels: (B, heads, N, d) -> (B, heads)."""
    return tokens.to("cpu", torch.float64).square().mean((-2, -1)).sqrt()


def unevenness(rows: Tensor) -> Tensor:
    """How far rows are from uniform, the mean over the rows: (B, heads, rows, L) -> (B, heads).

    The total variation distance between |row|, divided by its sum, and 1 / L everywhere: the share
    of the weight that is not where equal weights have it. 0 if all weights are equal, 1 - 1 / L if
    one key has all of it.
    """
    weights = rows.to("cpu", torch.float64).abs()
    shares = weights / weights.sum(-1, keepdim=True).clamp(min=tiny(torch.float64))
    return (shares - 1 / rows.shape[-1]).abs().sum(-1).mean(-1) / 2


def _of_inverse(a: Tensor, x: Tensor, ridge: float) -> Measures:
    """Of the inverse X that a layer computes of its landmark matrix A."""
    inverted = add_ridge(a, ridge)
    residual = inverted @ x @ inverted - inverted
    values = eigenvalues(a)
    return {
        "eigenvalues": values,
        "condition": _condition(values),
        "ridged_condition": _condition(values + ridge),
        "inverse_norm": largest_eigenvalue(x),
        "residual": torch.linalg.matrix_norm(residual) / torch.linalg.matrix_norm(inverted),
    }


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
