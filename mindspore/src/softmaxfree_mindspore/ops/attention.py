"""Softmax-free attention: exact and quadratic, or through m landmarks and linear."""

from functools import cache
from typing import Any

from mindspore import Tensor, nn, ops

from .checks import check_same_length, check_same_width, check_tokens
from .inverse import check_inverse, kernel_inverse
from .kernel import kernel_matrix, kernel_product, token_scale
from .precision import TINY, widened
from .products import product, t_product
from .smoothing import smoothing_attention

MIDDLES = ("inverse", "sums")
"""What Z is: the inverse of the landmarks' kernel matrix, or one over the sums of P_k^T w."""

_LEAST_SUM = 1e-3
"""Sums of rows are at least this, in units of the largest weight of a key."""


def softmax_free_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Tensor,
    normalize: bool = True,
    method: str = "auto",
    iters: int = 20,
    ridge: float | None = None,
    middle: str = "inverse",
    rows: bool = False,
    log_weights: Tensor | None = None,
) -> Tensor:
    """Attention through landmarks, linear in the number of queries and keys.

    With P the kernel of tokens and landmarks, A that of the landmarks, D = diag(A 1):
    SOFT is P A^+ P^T V (the paper's `eq:reg_attn`), SOFT++ is P D^-1/2 A^+ D^-1/2 P^T V
    (`eq:reg_norm_attn`). Beyond the paper, with a weight w for every key and S = P Z P^T, the rows
    can be divided by their sums, S diag(w) V / S w, and Z can be diag(P^T w)^-1 in place of A^+:
    then no entry is negative, and each row sums to 1.

    Args:
        q: (..., n, d) queries.
        k: (..., l, d) keys; pass q itself for self-attention, which is then cheaper.
        v: (..., l, e) values.
        landmarks: (..., m, d) landmarks, on the scale of q and k.
        normalize: SOFT++ if true, SOFT if not.
        method, iters, ridge: How A is inverted, see `pinv`.
        middle: What Z is: `inverse`, as in the paper, or `sums`, which has no inverse and for
            which `normalize` has no meaning.
        rows: Divide rows by their sums, which are taken as 1e-3 (in units of the largest weight)
            where they are smaller. Always so if `middle` is `sums`.
        log_weights: (..., l), the logarithms of the weights of keys, if rows are divided by sums.

    Returns:
        (..., n, e), in v's type.
    """
    check_tokens(q=q, k=k, v=v, landmarks=landmarks)
    check_same_width(q=q, k=k, landmarks=landmarks)
    check_same_length(k=k, v=v)
    check_middle(middle)
    if log_weights is not None:
        if not rows and middle != "sums":
            raise ValueError(
                "log_weights are given, but rows are not divided by their sums; pass rows=True"
            )
        if log_weights.shape != k.shape[:-1]:
            raise ValueError(f"log_weights must be {k.shape[:-1]}, got {log_weights.shape}")
    ridge = check_inverse(method, iters, ridge)
    scale = token_scale(q.shape[-1])
    keys = None if k is q else widened(k) * scale
    attend = _landmark_attention(normalize, method, iters, ridge, middle, rows)
    return attend(widened(q) * scale, keys, v, widened(landmarks) * scale, log_weights)


def check_middle(middle: str) -> None:
    if middle not in MIDDLES:
        raise ValueError(f"middle must be one of {', '.join(MIDDLES)}, got {middle!r}")


class LandmarkAttention(nn.Cell):
    """`softmax_free_attention` of tokens that are scaled by d^(-1/4) already.

    Args:
        normalize: SOFT++ if true, SOFT if not.
        method, iters, ridge: How A is inverted, see `pinv`.
        middle, rows: See `softmax_free_attention`.
    """

    def __init__(
        self,
        normalize: bool,
        method: str,
        iters: int,
        ridge: float | None,
        middle: str,
        rows: bool,
    ) -> None:
        super().__init__()
        self.normalize, self.middle, self.rows = normalize, middle, rows
        self.inverse = kernel_inverse(method, iters, ridge)

    def construct(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        landmarks: Tensor,
        log_weights: Tensor | None = None,
    ) -> Tensor:
        """q (..., n, d), k (..., l, d) or None if it is q, v (..., l, e), landmarks (..., m, d),
        logarithms of the keys' weights (..., l) -> (..., n, e)."""
        q, landmarks, values = widened(q), widened(landmarks), widened(v)
        k = None if k is None else widened(k)
        log_weights = None if log_weights is None else widened(log_weights)
        if self.middle == "sums":
            keys = q if k is None else k
            out = smoothing_attention(q, keys, values, landmarks, log_weights)
            return out.astype(v.dtype)
        if self.rows:
            values = _with_weights(values, log_weights)
        a = kernel_matrix(landmarks, landmarks)
        z = self.inverse(a)
        if self.normalize:
            root = ops.rsqrt(a.sum(-1, keepdims=True))
            z = z * (root * root.swapaxes(-1, -2))
        p_q = kernel_product(q, landmarks)
        p_k = p_q if k is None else kernel_product(k, landmarks)
        # From the right: O(n m d), where P Z first would be O(n m^2).
        out = product(p_q, product(z, t_product(p_k, values)))
        if self.rows:
            out = out[..., :-1] / ops.clamp(out[..., -1:], min=_LEAST_SUM)
        return out.astype(v.dtype)


def _with_weights(values: Tensor, log_weights: Tensor | None) -> Tensor:
    """[w v, w] for weights w: (..., l, e) -> (..., l, e + 1). The largest weight is 1."""
    if log_weights is None:
        return ops.cat((values, ops.ones_like(values[..., :1])), -1)
    largest = ops.stop_gradient(ops.amax(log_weights, -1, True))
    weights = ops.expand_dims(ops.exp(log_weights - largest), -1)
    return ops.cat((values * weights, weights), -1)


@cache
def _landmark_attention(*arguments: Any) -> nn.Cell:
    return LandmarkAttention(*arguments)  # kept, and in graph mode compiled, once


def gaussian_attention(q: Tensor, k: Tensor, v: Tensor, normalize: bool = False) -> Tensor:
    """Exact attention with the Gaussian kernel, at quadratic cost: S V, S = `gaussian_kernel`.

    Args:
        q: (..., n, d) queries.
        k: (..., l, d) keys.
        v: (..., l, e) values.
        normalize: Divide S_ij by the roots of its row's and its column's sum. The spectral norm
            is then at most 1; without it the norm grows with the number of tokens.

    Returns:
        (..., n, e), in v's type.
    """
    scale = token_scale(q.shape[-1])
    kernel = kernel_matrix(widened(q) * scale, widened(k) * scale)
    values = widened(v)
    if not normalize:
        return product(kernel, values).astype(v.dtype)
    rows = ops.rsqrt(ops.clamp(kernel.sum(-1, keepdims=True), min=TINY))
    columns = ops.rsqrt(ops.clamp(kernel.sum(-2, keepdims=True), min=TINY)).swapaxes(-1, -2)
    return (rows * product(kernel, columns * values)).astype(v.dtype)
