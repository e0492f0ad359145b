"""Softmax-free attention: exact and quadratic, or through m landmarks and linear."""

from functools import cache

from mindspore import Tensor, nn, ops

from .checks import check_same_length, check_same_width, check_tokens
from .inverse import check_inverse, kernel_inverse
from .kernel import kernel_matrix, kernel_product, token_scale
from .precision import TINY, widened
from .products import product, t_product


def softmax_free_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Tensor,
    normalize: bool = True,
    method: str = "auto",
    iters: int = 20,
    ridge: float | None = None,
) -> Tensor:
    """Attention through landmarks, linear in the number of queries and keys.

    With P the kernel of tokens and landmarks, A that of the landmarks, D = diag(A 1):
    SOFT is P A^+ P^T V (the paper's `eq:reg_attn`), SOFT++ is P D^-1/2 A^+ D^-1/2 P^T V
    (`eq:reg_norm_attn`).

    Args:
        q: (..., n, d) queries.
        k: (..., l, d) keys; pass q itself for self-attention, which is then cheaper.
        v: (..., l, e) values.
        landmarks: (..., m, d) landmarks, on the scale of q and k.
        normalize: SOFT++ if true, SOFT if not.
        method, iters, ridge: How A is inverted, see `pinv`.

    Returns:
        (..., n, e), in v's type.
    """
    check_tokens(q=q, k=k, v=v, landmarks=landmarks)
    check_same_width(q=q, k=k, landmarks=landmarks)
    check_same_length(k=k, v=v)
    ridge = check_inverse(method, iters, ridge)
    scale = token_scale(q.shape[-1])
    keys = None if k is q else widened(k) * scale
    attend = _landmark_attention(normalize, method, iters, ridge)
    return attend(widened(q) * scale, keys, v, widened(landmarks) * scale)


class LandmarkAttention(nn.Cell):
    """`softmax_free_attention` of tokens that are scaled by d^(-1/4) already.

    Args:
        normalize: SOFT++ if true, SOFT if not.
        method, iters, ridge: How A is inverted, see `pinv`.
    """

    def __init__(self, normalize: bool, method: str, iters: int, ridge: float | None) -> None:
        super().__init__()
        self.normalize = normalize
        self.inverse = kernel_inverse(method, iters, ridge)

    def construct(self, q: Tensor, k: Tensor | None, v: Tensor, landmarks: Tensor) -> Tensor:
        """q (..., n, d), k (..., l, d) or None if it is q, v (..., l, e), landmarks (..., m, d)
        -> (..., n, e)."""
        landmarks, values = widened(landmarks), widened(v)
        a = kernel_matrix(landmarks, landmarks)
        z = self.inverse(a)
        if self.normalize:
            root = ops.rsqrt(a.sum(-1, keepdims=True))
            z = z * (root * root.swapaxes(-1, -2))
        p_q = kernel_product(widened(q), landmarks)
        p_k = p_q if k is None else kernel_product(widened(k), landmarks)
        # From the right: O(n m d), where P Z first would be O(n m^2).
        out = product(p_q, product(z, t_product(p_k, values)))
        return out.astype(v.dtype)


@cache
def _landmark_attention(normalize: bool, method: str, iters: int, ridge: float) -> nn.Cell:
    return LandmarkAttention(normalize, method, iters, ridge)


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
