"""The Gaussian kernel that compares tokens: k(x, y) = exp(-|x - y|^2 / 2) on scaled tokens.

There are two ways to it. `kernel_matrix` subtracts all pairs: right for tokens of any magnitude,
near-duplicates among them, it serves whatever is inverted. `kernel_product` is one matrix product
of centred tokens, and serves the large n x m factor. Both have their gradient in closed form.
"""

from mindspore import Tensor, nn, ops

from .checks import check_same_width, check_tokens
from .precision import LARGEST, widened
from .products import product, product_t, t_product


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    """Similarity of every token of q with every token of k.

    S_ij = exp(-|q_i - k_j|^2 / (2 sqrt(d))), the paper's `eq:soft_attn_func`. Values lie in
    [0, 1]; `gaussian_kernel(q, q)` is symmetric with diagonal 1.

    Args:
        q: (..., n, d).
        k: (..., m, d), its leading axes equal to q's.

    Returns:
        (..., n, m), in q's type.
    """
    check_tokens(q=q, k=k)
    check_same_width(q=q, k=k)
    scale = token_scale(q.shape[-1])
    return kernel_matrix(widened(q) * scale, widened(k) * scale).astype(q.dtype)


def token_scale(width: int) -> float:
    """d^(-1/4): tokens are multiplied with it, so that the kernel is exp(-|x - y|^2 / 2)."""
    return width**-0.25


class _Kernel(nn.Cell):
    """exp(-|x_i - y_j|^2 / 2): (..., n, d), (..., m, d) -> (..., n, m)."""

    def exponents(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.exp(self.exponents(x, y))

    def bprop(self, x: Tensor, y: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        # Only differences of tokens count; taken from a centre they keep their digits.
        centre = y.mean(-2, keep_dims=True)
        x, y = x - centre, y - centre
        weights = dout * out
        rows, columns = weights.sum(-1, keepdims=True), weights.sum(-2, keepdims=True)
        return (
            product(weights, y) - rows * x,
            t_product(weights, x) - columns.swapaxes(-1, -2) * y,
        )


class _Differences(_Kernel):
    def exponents(self, x: Tensor, y: Tensor) -> Tensor:
        """-|x_i - y_j|^2 / 2 from all differences, (..., n, m, d) of them."""
        return -0.5 * ops.square(ops.expand_dims(x, -2) - ops.expand_dims(y, -3)).sum(-1)


class _Product(_Kernel):
    def exponents(self, x: Tensor, y: Tensor) -> Tensor:
        """x.y - |x|^2 / 2 - |y|^2 / 2, both without y's mean, never positive.

        As the product of rows [x, 1, |x|^2] and [y, -|y|^2 / 2, -1 / 2]: sums that broadcast over
        (n, m) take longer than it.
        """
        bound = LARGEST / (2 * x.shape[-1])  # keeps squares and products finite
        centre = y.mean(-2, keep_dims=True)
        x, y = ops.clamp(x - centre, -bound, bound), ops.clamp(y - centre, -bound, bound)
        norms_x = ops.square(x).sum(-1, keepdims=True)
        norms_y = ops.square(y).sum(-1, keepdims=True)
        rows = ops.cat((x, ops.ones_like(norms_x), norms_x), -1)
        columns = ops.cat((y, -0.5 * norms_y, -0.5 * ops.ones_like(norms_y)), -1)
        return ops.clamp(product_t(rows, columns), max=0.0)


kernel_matrix = _Differences()
"""exp(-|x_i - y_j|^2 / 2) of (..., n, d) and (..., m, d); of x and x symmetric with diagonal 1."""

kernel_product = _Product()
"""The same to fewer digits by one matrix product, for y the landmarks."""
