"""The Gaussian kernel that compares tokens: k(x, y) = exp(-|x - y|^2 / 2) on scaled tokens."""

from typing import Any

import torch
from torch import Tensor

from .backends import choose
from .batching import keep_signature, mapped_axis_first, needs_apply
from .checks import broadcast_leading, check_same_width, check_tokens
from .distances import FAR, centred, far_gradient, far_matrices
from .precision import compute_dtype, without_autocast


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    """Similarity of every token of q with every token of k.

    S_ij = exp(-|q_i - k_j|^2 / (2 sqrt(d))), the paper's `eq:soft_attn_func`. Values lie in
    [0, 1]; `gaussian_kernel(q, q)` is symmetric with diagonal 1.

    Args:
        q: (..., n, d).
        k: (..., m, d), its leading axes equal to q's or 1.

    Returns:
        (..., n, m), in q's type.
    """
    check_tokens(q=q, k=k)
    check_same_width(q=q, k=k)
    broadcast_leading(q=q, k=k)
    dtype = compute_dtype(q, k)
    y = None if k is q else k.to(dtype)
    return kernel_matrix(q.to(dtype), y, token_scale(q.shape[-1])).to(q.dtype)


def token_scale(width: int) -> float:
    """d^(-1/4): the kernel of tokens multiplied by it is exp(-|x - y|^2 / 2)."""
    return width**-0.25


def kernel_matrix(x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """exp(-|scale (x_i - y_j)|^2 / 2).

    Args:
        x: (..., n, d), float32 or float64.
        y: (..., m, d), x itself when None: the result is then symmetric with diagonal 1.
        scale: Multiplies both x and y.

    Returns:
        (..., n, m).
    """
    if y is not None:
        leading = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        x, y = x.expand(*leading, -1, -1), y.expand(*leading, -1, -1)
    return (_Kernel.apply if needs_apply(x, y) else _Kernel.forward)(x, y, scale)


class _Kernel(torch.autograd.Function):
    """K_ij = exp(-s^2 |x_i - y_j|^2 / 2).

    With G the gradient of K, dK_ij / dx_i = s^2 K_ij (y_j - x_i) gives, for W = s^2 G * K,
        dx_i = sum_j W_ij (y_j - x_i) = (W y)_i - (W 1)_i x_i,
        dy_j = sum_i W_ij (x_i - y_j) = (W^T x)_j - (W^T 1)_j y_j.
    If y is x, the two add up: W + W^T takes the place of W in the first.
    """

    @staticmethod
    @keep_signature
    def forward(x: Tensor, y: Tensor | None, scale: float) -> Tensor:
        with without_autocast(x):
            return choose(x).kernel_matrix(x, y, scale)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor
    ) -> None:
        x, y, ctx.scale = inputs
        ctx.save_for_backward(x, y, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, y, kernel = ctx.saved_tensors
        with without_autocast(x):
            # Only differences of tokens count; measured from a centre they keep their digits.
            centre, (_, norms) = centred((x if y is None else y).detach(), ctx.scale)
            weights = grad * kernel * ctx.scale**2
            left = x - centre
            if y is None:
                weights = weights + weights.mT
                grads = [weights @ left - weights.sum(-1, keepdim=True) * left]
            else:
                right = y - centre
                grads = [
                    weights @ right - weights.sum(-1, keepdim=True) * left,
                    weights.mT @ left - weights.sum(-2).unsqueeze(-1) * right,
                ]
            if not torch.is_grad_enabled():
                for i in far_matrices(norms, FAR / ctx.scale**2):
                    tokens = [t[i] for t in (x, y) if t is not None]
                    for whole, part in zip(grads, far_gradient(tokens, grad[i], ctx.scale)):
                        whole[i] = part
        return grads[0], grads[1] if len(grads) > 1 else None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, y: Tensor | None, scale: float
    ) -> tuple[Tensor, int]:
        x = mapped_axis_first(x, in_dims[0], info.batch_size)
        if y is not None:
            y = mapped_axis_first(y, in_dims[1], info.batch_size)
        return _Kernel.apply(x, y, scale), 0
