"""Squared distances between tokens and landmarks, as exponents of the Gaussian kernel.

There are two ways to compute them. Rows [x, 1, |x|^2] times columns [y, -|y|^2 / 2, -1 / 2] make
one matrix product, -|x - y|^2 / 2. It is fast, and its rounding error grows with the square of
the distance from the centre that both are measured from. `far_kernel` subtracts token from token
and is right at any magnitude. The product is used for all landmarks that are near enough to the
centre, differences for the others.
"""

import math

import torch
from torch import Tensor

from .batching import is_readable

TO_BASE_2 = math.log2(math.e) ** 0.5
"""exp(-|x - y|^2 / 2) = 2^(-|cx - cy|^2 / 2) for this c. exp2 takes half the time of exp on a
CPU, and an eighth where values underflow."""

FAR = 2.0**12
"""Squared distance from the centre beyond which a landmark is compared by differences. Up to
there the exponent's error is at most FAR times the rounding unit: 5e-4 in float32."""

_FAR_FOR_FLOAT32 = 2.0**32
"""The same limit for float32 tokens whose product is computed in float64: an error of 1e-6."""

Measured = tuple[Tensor, Tensor]
"""Tokens (..., n, d) relative to a centre, and their squared norms (..., n, 1)."""


def centred(landmarks: Tensor, scale: float) -> tuple[Tensor, Measured]:
    """A centre (..., 1, d), treated as a constant, and the landmarks relative to it.

    Any centre gives the same kernel; the landmarks' mean keeps rounding errors small. If one
    landmark is far from the mean, the mean may be far from all the others: the centre is then
    the landmark nearest to the mean.
    """
    fixed = landmarks.detach()
    # Divided before the sum, so that the sum stays finite.
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
    """Tokens relative to the centre, and their squared norms.

    The centre is subtracted before anything else, which is exact for tokens close to it.
    """
    bound = token_bound(tokens)
    return _with_norms((tokens - centre).clamp(-bound, bound))


def measure_into(out: Tensor, tokens: Tensor, centre: Tensor) -> Tensor:
    """Tokens relative to the centre, written to `out`."""
    bound = token_bound(tokens)
    return torch.sub(tokens, centre, out=out).clamp_(-bound, bound)


def _with_norms(x: Tensor) -> Measured:
    return x, x.square().sum(-1, keepdim=True)


def token_bound(tokens: Tensor) -> float:
    """Tokens within this bound have finite squared norms and products."""
    return torch.finfo(tokens.dtype).max ** 0.5 / (2 * tokens.shape[-1])


def columns_of(landmarks: Measured, scale: float) -> Tensor:
    """[y, -|y|^2 / 2, -1 / 2] of landmarks y, times scale^2: (..., m, d + 2)."""
    y, norms = landmarks
    columns = torch.cat([y, norms * -0.5, torch.full_like(norms, -0.5)], -1)
    return columns.mul_(scale**2)


def exponents(x: Tensor, y: Tensor | None, scale: float) -> Tensor:
    """-|scale (x_i - y_j)|^2 / 2, (..., n, m), never positive; y is x if None.

    The expansion x.y - |x|^2 / 2 - |y|^2 / 2 loses the digits of a small distance between large
    tokens. In float64 it keeps more of them than float32 tokens have, at a fifth of the cost of
    subtracting all pairs.
    """
    others = x if y is None else y
    if x.device.type == "mps":  # has no float64
        pairs = x.unsqueeze(-2) - others.unsqueeze(-3)
        return pairs.mul_(scale).square_().sum(-1).mul_(-0.5)
    centre, right = centred(_in_float64(others), scale)
    left = right if y is None else _with_norms(_in_float64(x) - centre)
    if torch.compiler.is_compiling():
        return expanded_exponents(left, right, scale).to(x.dtype).clamp(max=0)
    tokens, norms = left
    rows = torch.cat([tokens, torch.ones_like(norms), norms], -1)
    out = (rows @ columns_of(right, scale).mT).to(x.dtype).clamp_(max=0)
    limit = FAR if x.dtype == torch.float64 else _FAR_FOR_FLOAT32
    for i in far_matrices(right[1], limit / scale**2):
        out[i] = _far_exponents(x[i], others[i], scale)
    return out


def expanded_exponents(left: Measured, right: Measured, scale: float) -> Tensor:
    """-|scale (x - y)|^2 / 2 as x.y - |x|^2 / 2 - |y|^2 / 2, for compilers to fuse.

    It avoids the concatenation of narrow columns, for which torch 2.15 generates C++ code that
    writes beyond the end of its buffer.
    """
    (x, x_norms), (y, y_norms) = left, right
    half = -0.5 * scale**2
    return x @ (y * scale**2).mT + x_norms * half + y_norms.mT * half


def far_kernel(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """exp(-|scale (x_i - y_j)|^2 / 2), (n, m), of tokens of any magnitude, in float64.

    Tokens are subtracted before they are scaled: differences of close tokens are exact then.
    """
    return _far_exponents(x, y, scale * TO_BASE_2).exp2()


def _far_exponents(x: Tensor, y: Tensor, scale: float) -> Tensor:
    distances = torch.cdist(
        _in_float64(x), _in_float64(y), compute_mode="donot_use_mm_for_euclid_dist"
    )
    return (distances * scale).square() * -0.5


def _in_float64(tokens: Tensor) -> Tensor:
    """Tokens in float64, with finite squares; float64 tokens are clamped to ensure that."""
    return tokens.clamp(-1e150, 1e150) if tokens.dtype == torch.float64 else tokens.double()


def far_gradient(tokens: list[Tensor], grad: Tensor, scale: float) -> tuple[Tensor, ...]:
    """The gradient of `far_kernel(x, y)` for tokens [x, y], or of `far_kernel(x, x)` for [x]."""
    with torch.enable_grad():
        leaves = [_in_float64(x.detach()).requires_grad_() for x in tokens]
        values = far_kernel(leaves[0], leaves[-1], scale)
    return torch.autograd.grad(values, leaves, grad.to(values.dtype))


def far_matrices(norms: Tensor, limit: float) -> list[tuple[int, ...]]:
    """Indices into (...) of the matrices whose squared norms (..., m, 1) exceed the limit.

    Empty where values cannot be read: in compiled graphs and on accelerators.
    """
    if not is_readable(norms) or norms.amax() <= limit:
        return []
    return [tuple(place) for place in (norms.amax((-2, -1)) > limit).nonzero().tolist()]
