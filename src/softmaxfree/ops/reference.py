"""The same operations, slow and obvious: what the fast ones are tested against.

Written as the paper writes them, one line an equation: every pair of tokens is subtracted, every
matrix is formed, the inverse comes from the eigenvalues. Use float64.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    """(..., n, d), (..., m, d) -> (..., n, m)."""
    squared = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    return torch.exp(-squared / (2 * q.shape[-1] ** 0.5))


def gaussian_attention(
    q: Tensor, k: Tensor, v: Tensor, normalize: bool = False, mask: Tensor | None = None
) -> Tensor:
    """S V, or D_q^-1/2 S D_k^-1/2 V with D the row and column sums of S."""
    s = gaussian_kernel(q, k)
    if mask is not None:
        s = torch.where(mask.unsqueeze(-2), s, 0)
    if normalize:
        rows = s.sum(-1)
        columns = rows if k is q else s.sum(-2)
        s = s / (rows.unsqueeze(-1) * columns.unsqueeze(-2)).sqrt()
        if mask is not None:
            s = torch.where(mask.unsqueeze(-2), s, 0)
    return s @ v


def pinv(a: Tensor, ridge: float = 0.0) -> Tensor:
    """Inverse of A + ridge I over the eigenvalues that are not 0."""
    return spectral(a + ridge * torch.eye(a.shape[-1], dtype=a.dtype), lambda s: 1 / s)


def newton(a: Tensor, alpha: Tensor, iters: int) -> Tensor:
    """What Newton's steps 2Z - ZAZ from alpha A give, by the eigenvalues s of A:
    (1 - (1 - alpha s^2)^(2^iters)) / s."""
    return spectral(a, lambda s: (1 - (1 - alpha.squeeze(-1) * s**2) ** (2.0**iters)) / s)


def spectral(a: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """f(A) of symmetric matrices; f(0) = 0 for eigenvalues that rounding cannot tell from 0."""
    s, u = torch.linalg.eigh(a)
    zero = s.abs() <= 1e-13 * s.abs().amax(-1, keepdim=True)
    f = torch.where(zero, 0, function(torch.where(zero, 1, s)))
    return u @ torch.diag_embed(f) @ u.mT


def softmax_free_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Tensor,
    normalize: bool = True,
    ridge: float = 0.01,
    mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
    middle: str = "inverse",
    rows: bool = False,
    log_weights: Tensor | None = None,
) -> Tensor:
    """The n x n matrix S = P_q Z P_k^T, times V; with rows that are divided, S diag(w) V / S w.

    Z is A^+, D^-1/2 A^+ D^-1/2 or, with `middle="sums"`, diag(P_k^T w)^-1.
    """
    a = gaussian_kernel(landmarks, landmarks)
    p_q, p_k = gaussian_kernel(q, landmarks), gaussian_kernel(k, landmarks)
    if landmark_mask is not None:
        keep = landmark_mask.unsqueeze(-1) & landmark_mask.unsqueeze(-2)
        a = torch.where(keep, a, torch.eye(a.shape[-1], dtype=a.dtype))
        p_q = torch.where(landmark_mask.unsqueeze(-2), p_q, 0)
        p_k = torch.where(landmark_mask.unsqueeze(-2), p_k, 0)
    if mask is not None:
        p_k = torch.where(mask.unsqueeze(-1), p_k, 0)
    w = torch.ones_like(k[..., 0]) if log_weights is None else log_weights.exp()
    w = w / w.amax(-1, keepdim=True)
    if middle == "sums":
        z = torch.diag_embed(1 / (p_k.mT @ w.unsqueeze(-1)).squeeze(-1))
        z = torch.where(z.isfinite(), z, 0)  # landmarks that are dropped
    else:
        z = pinv(a, ridge)
        if normalize:
            root = torch.diag_embed(a.sum(-1) ** -0.5)
            z = root @ z @ root
    s = p_q @ z @ p_k.mT
    if not rows and middle == "inverse":
        return s @ v
    s = s * w.unsqueeze(-2)
    return (s @ v) / s.sum(-1, keepdim=True).clamp(min=1e-3 if middle == "inverse" else 1e-300)
