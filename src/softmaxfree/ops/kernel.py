"""The Gaussian kernel that compares tokens: k(x, y) = exp(-|x - y|^2 / 2) on scaled tokens.

There are two ways to it. `kernel_matrix` is right for tokens of any magnitude, near-duplicates
among them, and serves whatever is inverted. Rows [x, 1, |x|^2] and `product_columns` make it one
matrix product, k = exp(rows columns^T), and serve the large n x m factor.
"""

import math
from typing import Any

import torch
from torch import Tensor

from . import native
from .batching import keep_signature, mapped_axis_first, needs_apply
from .checks import broadcast_leading, check_same_width, check_tokens
from .precision import compute_dtype, without_autocast

TO_BASE_2 = math.log2(math.e) ** 0.5
"""exp(-|x - y|^2 / 2) = 2^(-|cx - cy|^2 / 2) for this c. exp2 takes half the time of exp on a
CPU, an eighth where values underflow."""

Measured = tuple[Tensor, Tensor]
"""Tokens (..., n, d) and their squared norms (..., n, 1)."""


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
    """d^(-1/4): tokens are multiplied with it, so that the kernel is exp(-|x - y|^2 / 2)."""
    return width**-0.25


def kernel_matrix(x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """exp(-|x_i - y_j|^2 / 2) of tokens times the scale.

    Args:
        x: (..., n, d), float32 or float64.
        y: (..., m, d), x itself when None: the result is then symmetric with diagonal 1.
        scale: Of both.

    Returns:
        (..., n, m).
    """
    if y is not None:
        leading = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        x, y = x.expand(*leading, -1, -1), y.expand(*leading, -1, -1)
    return (_Kernel.apply if needs_apply(x, y) else _Kernel.forward)(x, y, scale)


class _Kernel(torch.autograd.Function):
    @staticmethod
    @keep_signature
    def forward(x: Tensor, y: Tensor | None, scale: float) -> Tensor:
        if y is None and native.takes_landmarks(x):
            return native.kernel_matrix(x, scale * TO_BASE_2)
        with without_autocast(x):
            kernel = _exponents(x, y, scale * TO_BASE_2).exp2_()
            if y is None:
                kernel = torch.maximum(kernel, kernel.mT)  # symmetric to the last bit
                if torch.compiler.is_compiling():  # exporters want no changes in place
                    diagonal = torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
                    return torch.where(diagonal, 1, kernel)
                kernel.diagonal(dim1=-2, dim2=-1).fill_(1)
            return kernel

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
            # Only differences of tokens count; taken from a centre they keep their digits.
            centre = (x if y is None else y).detach().mean(-2, keepdim=True)
            x = x - centre
            weights = grad * kernel * ctx.scale**2
            if y is None:
                weights = weights + weights.mT
                return weights @ x - weights.sum(-1, keepdim=True) * x, None, None
            y = y - centre
            return (
                weights @ y - weights.sum(-1, keepdim=True) * x,
                weights.mT @ x - weights.sum(-2).unsqueeze(-1) * y,
                None,
            )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, y: Tensor | None, scale: float
    ) -> tuple[Tensor, int]:
        x = mapped_axis_first(x, in_dims[0], info.batch_size)
        if y is not None:
            y = mapped_axis_first(y, in_dims[1], info.batch_size)
        return _Kernel.apply(x, y, scale), 0


def _exponents(x: Tensor, y: Tensor | None, scale: float) -> Tensor:
    """-|scale (x_i - y_j)|^2 / 2, (..., n, m), never positive.

    The expansion x.y - |x|^2 / 2 - |y|^2 / 2 loses the digits of a small distance between large
    tokens. In float64 it keeps more of them than float32 tokens have, at a fifth of the cost of
    subtracting all pairs.
    """
    if x.device.type == "mps":  # has no float64
        pairs = x.unsqueeze(-2) - (x if y is None else y).unsqueeze(-3)
        return pairs.mul_(scale).square_().sum(-1).mul_(-0.5)
    others = _in_float64(x if y is None else y)
    shift = others.mean(-2, keepdim=True) * -scale
    right = _with_norms(torch.add(shift, others, alpha=scale))
    left = right if y is None else _with_norms(torch.add(shift, _in_float64(x), alpha=scale))
    if torch.compiler.is_compiling():
        return exponents_of(left, right).to(x.dtype).clamp(max=0)
    return (_rows(*left) @ _columns(*right).mT).to(x.dtype).clamp(max=0)


def exponents_of(left: Measured, right: Measured) -> Tensor:
    """x.y - |x|^2 / 2 - |y|^2 / 2 term by term, for compilers to fuse.

    They are to see no concatenation of narrow columns: torch 2.15's C++ code for it writes
    beyond the end of its buffer.
    """
    (x, x_norms), (y, y_norms) = left, right
    return x @ y.mT - 0.5 * x_norms - 0.5 * y_norms.mT


def _in_float64(tokens: Tensor) -> Tensor:
    """Tokens whose squares stay finite; those of narrower types' values do so by themselves."""
    return tokens.clamp(-1e150, 1e150) if tokens.dtype == torch.float64 else tokens.double()


def product_columns(landmarks: Tensor, shift: Tensor, scale: float) -> Tensor:
    """[y, -|y|^2 / 2, -1 / 2] for y = scale * landmarks + shift: (..., m, d + 2)."""
    return _columns(*measured(landmarks, shift, scale))


def _rows(x: Tensor, norm: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(norm), norm], -1)


def _columns(y: Tensor, norm: Tensor) -> Tensor:
    return torch.cat([y, norm * -0.5, torch.full_like(norm, -0.5)], -1)


def measured(tokens: Tensor, shift: Tensor, scale: float) -> Measured:
    """Tokens, scaled and shifted, and their squared norms."""
    bound = token_bound(tokens)
    return _with_norms(torch.add(shift, tokens, alpha=scale).clamp(-bound, bound))


def _with_norms(x: Tensor) -> Measured:
    return x, x.square().sum(-1, keepdim=True)


def token_bound(tokens: Tensor) -> float:
    """Tokens within it have squared norms and products that stay finite."""
    return torch.finfo(tokens.dtype).max ** 0.5 / (2 * tokens.shape[-1])
