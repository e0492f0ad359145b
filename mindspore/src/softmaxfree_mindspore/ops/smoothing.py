"""Attention through landmarks without an inverse: two kernel smoothers, one after the other.

A Gaussian kernel whose rows are divided by their sums is a softmax of negative squared distances.
"""

from mindspore import Tensor, ops

from .precision import LARGEST
from .products import product, product_t


def smoothing_attention(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, log_weights: Tensor | None = None
) -> Tensor:
    """N(P_q) N(P_k^T diag(w)) V, where N divides each row by its sum.

    Every row of the product sums to 1, and nothing in it is negative.

    Args:
        q: (..., n, d) queries, scaled by d^(-1/4) as keys and landmarks are.
        k: (..., l, d) keys.
        v: (..., l, e) values.
        landmarks: (..., m, d).
        log_weights: (..., l), the logarithms of w; all 0 if None.

    Returns:
        (..., n, e).
    """
    centre = _centre(landmarks)
    q, k, landmarks = _around(q, centre), _around(k, centre), _around(landmarks, centre)
    return _smooth(q, landmarks, _smooth(landmarks, k, v, log_weights), None)


def _centre(landmarks: Tensor) -> Tensor:
    """The landmark nearest to their mean, (..., 1, d): near most of them if one is far off."""
    fixed = ops.stop_gradient(landmarks)
    mean = (fixed / fixed.shape[-2]).sum(-2, keepdims=True)
    nearest = ops.argmin(ops.square(fixed - mean).sum(-1), -1)
    index = nearest.reshape(*nearest.shape, 1, 1)
    return ops.gather_elements(fixed, -2, index.broadcast_to((*nearest.shape, 1, fixed.shape[-1])))


def _around(tokens: Tensor, centre: Tensor) -> Tensor:
    """Tokens relative to a centre; their squares and products are finite."""
    bound = LARGEST / (2 * tokens.shape[-1])
    return ops.clamp(tokens - centre, -bound, bound)


def _smooth(x: Tensor, y: Tensor, v: Tensor, log_weights: Tensor | None) -> Tensor:
    """sum_j p_ij v_j, p_ij = softmax_j(log w_j - |x_i - y_j|^2 / 2): (..., n, e).

    |x_i|^2 is the same for all j and cancels, which leaves x.y - |y|^2 / 2 + log w: the product of
    rows [x, 1] and [y, log w - |y|^2 / 2].
    """
    bias = -0.5 * ops.square(y).sum(-1, keepdims=True)
    if log_weights is not None:
        bias = bias + ops.expand_dims(log_weights, -1)
    rows, columns = ops.cat((x, ops.ones_like(x[..., :1])), -1), ops.cat((y, bias), -1)
    return product(ops.softmax(product_t(rows, columns), -1), v)
