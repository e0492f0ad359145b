"""Attention through landmarks without an inverse: two kernel smoothers, one after the other.

The kernel of queries and landmarks, and that of landmarks and keys, have rows that are divided by
their sums. A Gaussian kernel whose rows are divided by their sums is a softmax of negative squared
distances, so each of the two is one fused call of torch on every device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .batching import is_readable, is_wrapped
from .distances import centred, token_bound

_LARGE = 2.0**14
"""Largest terms of exponents that float32 is used for; the exponents' error is then below 1e-3."""

_FAR = 2.0**7
"""Largest distance from the centre, in kernel widths, that float32 is used for."""

_LARGEST = 1e150
"""Tokens are clamped to it in float64, so that their squares and products are finite."""


def smoothing_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Tensor,
    scale: float,
    log_weights: Tensor | None = None,
    mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
) -> Tensor:
    """N(P_q) N(P_k^T diag(w)) V, where N divides each row by its sum.

    Every row of the product sums to 1, and nothing in it is negative. What a mask drops must be
    finite, its values 0; a query without landmarks, or without keys, gets 0.

    Args:
        q: (..., n, d) queries, float32 or float64 as all others.
        k: (..., l, d) keys.
        v: (..., l, e) values.
        landmarks: (..., m, d).
        scale: Multiplies tokens and landmarks before they are compared.
        log_weights: (..., l), the logarithms of w; all 0 if None.
        mask: (..., l), True for the keys to keep.
        landmark_mask: (..., m), True for the landmarks to keep.

    Returns:
        (..., n, e).
    """
    if mask is not None:
        k = k.masked_fill(~mask.unsqueeze(-1), 0)
    centre = centred(landmarks, scale)[0]
    q, k, landmarks = (_around(x, centre, scale) for x in (q, k, landmarks))
    of_landmarks = _smooth(landmarks, k, v, scale, log_weights, mask)
    return _smooth(q, landmarks, of_landmarks, scale, None, landmark_mask)


def _around(tokens: Tensor, centre: Tensor, scale: float) -> Tensor:
    """Tokens relative to a centre: in float64 where float32 would lose their digits."""
    shifted = tokens - centre
    if is_readable(shifted) and not shifted.abs().amax() * scale <= _FAR:
        return (tokens.double() - centre).clamp(-_LARGEST, _LARGEST)
    bound = token_bound(tokens)
    return shifted.clamp(-bound, bound)


def _smooth(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    scale: float,
    log_weights: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """sum_j p_ij v_j, p_ij = softmax_j(log w_j - |scale (x_i - y_j)|^2 / 2): (..., n, e).

    |x_i|^2 is the same for all j and cancels, which leaves x.y - |y|^2 / 2: one more column of a
    product that the softmax is taken of.
    """
    dtype = torch.float64 if _terms(x, y, scale) > _LARGE else v.dtype
    x, y = x.to(dtype), y.to(dtype)
    bias = y.square().sum(-1, keepdim=True) * (-0.5 * scale**2)
    if log_weights is not None:
        bias = bias + log_weights.unsqueeze(-1)
    if mask is not None:
        # Not minus infinity, whose product with a gradient of 0 is NaN.
        bias = bias.masked_fill(~mask.unsqueeze(-1), torch.finfo(bias.dtype).min / 4)
    rows, columns = F.pad(x, (0, 1), value=1.0), torch.cat([y * scale**2, bias], -1)
    if not torch.compiler.is_compiling() and any(is_wrapped(t) for t in (rows, columns, v)):
        return ((rows @ columns.mT).softmax(-1) @ v.to(rows.dtype)).to(v.dtype)
    width = v.shape[-1]
    # The fused kernels want values as wide as keys.
    values = F.pad(v.to(rows.dtype), (0, max(rows.shape[-1] - width, 0)))
    out = F.scaled_dot_product_attention(rows, columns, values, scale=1.0)
    return out[..., :width].to(v.dtype)


def _terms(x: Tensor, y: Tensor, scale: float) -> float:
    """A bound for scale^2 (|x.y| + |y|^2); 0 where values cannot be read."""
    if not is_readable(x) or not is_readable(y):
        return 0.0
    largest_x, largest_y = (float(t.detach().abs().amax()) for t in (x, y))
    return largest_y * (largest_x + largest_y) * x.shape[-1] * scale**2
