"""The Gaussian kernel that compares tokens: k(x, y) = exp(-|x - y|^2 / 2) on scaled tokens.

There are two ways to it. Rows [x, 1, |x|^2] and `columns_of` landmarks make it one matrix product,
k = exp(rows columns^T), which is fast, and loses digits with the square of the landmarks' distance
from the centre that both are measured from. `far_kernel` subtracts token from token, and is right
for any magnitude. `kernel_matrix` and the large n x m factor take the product, and differences for
what is too far away for it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from . import native
from .batching import is_readable, keep_signature, mapped_axis_first, needs_apply
from .checks import broadcast_leading, check_same_width, check_tokens
from .precision import compute_dtype, without_autocast

TO_BASE_2 = math.log2(math.e) ** 0.5
"""exp(-|x - y|^2 / 2) = 2^(-|cx - cy|^2 / 2) for this c. exp2 takes half the time of exp on a
CPU, an eighth where values underflow."""

FAR = 2.0**12
"""Squared distance of a landmark from the centre beyond which it is compared by differences. A
product's exponent is then off by FAR times the rounding of its type: by 5e-4 in float32."""

_FAR_FOR_FLOAT32 = 2.0**32
"""The same for float32 tokens whose product is in float64: off by 1e-6."""

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


def _exponents(x: Tensor, y: Tensor | None, scale: float) -> Tensor:
    """-|scale (x_i - y_j)|^2 / 2, (..., n, m), never positive.

    The expansion x.y - |x|^2 / 2 - |y|^2 / 2 loses the digits of a small distance between large
    tokens. In float64 it keeps more of them than float32 tokens have, at a fifth of the cost of
    subtracting all pairs.
    """
    if x.device.type == "mps":  # has no float64
        pairs = x.unsqueeze(-2) - (x if y is None else y).unsqueeze(-3)
        return pairs.mul_(scale).square_().sum(-1).mul_(-0.5)
    others = x if y is None else y
    centre, right = centred(_in_float64(others), scale)
    left = right if y is None else _with_norms(_in_float64(x) - centre)
    if torch.compiler.is_compiling():
        return exponents_of(left, right, scale).to(x.dtype).clamp(max=0)
    out = (_rows(*left) @ columns_of(right, scale).mT).to(x.dtype).clamp_(max=0)
    limit = FAR if x.dtype == torch.float64 else _FAR_FOR_FLOAT32
    for i in far_matrices(right[1], limit / scale**2):
        out[i] = _far_exponents(x[i], others[i], scale)
    return out


def exponents_of(left: Measured, right: Measured, scale: float) -> Tensor:
    """-|scale (x - y)|^2 / 2 as x.y - |x|^2 / 2 - |y|^2 / 2, for compilers to fuse.

    They are to see no concatenation of narrow columns: torch 2.15's C++ code for it writes
    beyond the end of its buffer.
    """
    (x, x_norms), (y, y_norms) = left, right
    half = -0.5 * scale**2
    return x @ (y * scale**2).mT + x_norms * half + y_norms.mT * half


def _in_float64(tokens: Tensor) -> Tensor:
    """Tokens whose squares stay finite; those of narrower types' values do so by themselves."""
    return tokens.clamp(-1e150, 1e150) if tokens.dtype == torch.float64 else tokens.double()


def far_kernel(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """exp(-|scale (x_i - y_j)|^2 / 2), (n, m), of tokens of any magnitude, in float64.

    From their differences before they are scaled: those of close tokens are exact then.
    """
    return _far_exponents(x, y, scale * TO_BASE_2).exp2()


def _far_exponents(x: Tensor, y: Tensor, scale: float) -> Tensor:
    distances = torch.cdist(
        _in_float64(x), _in_float64(y), compute_mode="donot_use_mm_for_euclid_dist"
    )
    return (distances * scale).square() * -0.5


def far_gradient(tokens: list[Tensor], grad: Tensor, scale: float) -> tuple[Tensor, ...]:
    """That of `far_kernel` of x and y, or of x with itself, for the gradient of its values."""
    with torch.enable_grad():
        leaves = [_in_float64(x.detach()).requires_grad_() for x in tokens]
        values = far_kernel(leaves[0], leaves[-1], scale)
    return torch.autograd.grad(values, leaves, grad.to(values.dtype))


def far_matrices(norms: Tensor, limit: float) -> list[tuple[int, ...]]:
    """Of squared norms (..., m, 1): where in (...) there is one beyond the limit.

    None, where their values cannot be looked at: in compiled graphs, on accelerators.
    """
    if not is_readable(norms) or norms.amax() <= limit:
        return []
    return [tuple(place) for place in (norms.amax((-2, -1)) > limit).nonzero().tolist()]


def _rows(x: Tensor, norm: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(norm), norm], -1)


def columns_of(landmarks: Measured, scale: float) -> Tensor:
    """[y, -|y|^2 / 2, -1 / 2] of landmarks y, times scale^2: (..., m, d + 2)."""
    y, norm = landmarks
    square = scale**2
    return torch.cat([y * square, norm * (-0.5 * square), torch.full_like(norm, -0.5 * square)], -1)


def centred(landmarks: Tensor, scale: float) -> tuple[Tensor, Measured]:
    """A centre (..., 1, d), a constant, and the landmarks as they lie around it.

    Any centre gives the same kernel; the landmarks' mean costs few digits. Where one of them is
    far from the mean, the mean may be far from all others: the centre is then the landmark that
    is nearest to the mean.
    """
    fixed = landmarks.detach()
    # Divided before they are added: the sum stays finite.
    centre = (fixed * (1 / fixed.shape[-2])).sum(-2, keepdim=True)
    around_mean = measured(landmarks, centre)
    norms, far = around_mean[1].detach(), FAR / scale**2
    if is_readable(norms) and norms.amax() <= far:
        return centre, around_mean
    nearest = norms.argmin(-2, keepdim=True).expand(*norms.shape[:-2], 1, fixed.shape[-1])
    has_far = norms.amax(-2, keepdim=True) > far
    centre = torch.where(has_far, fixed.gather(-2, nearest), centre)
    return centre, measured(landmarks, centre)


def measured(tokens: Tensor, centre: Tensor) -> Measured:
    """Tokens as they lie around the centre, and their squared norms.

    They are subtracted before anything else is done to them, which for close ones is exact.
    """
    bound = token_bound(tokens)
    return _with_norms((tokens - centre).clamp(-bound, bound))


def _with_norms(x: Tensor) -> Measured:
    return x, x.square().sum(-1, keepdim=True)


def token_bound(tokens: Tensor) -> float:
    """Tokens within it have squared norms and products that stay finite."""
    return torch.finfo(tokens.dtype).max ** 0.5 / (2 * tokens.shape[-1])
