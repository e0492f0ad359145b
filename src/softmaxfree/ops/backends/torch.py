"""The backend that computes everything by torch, on any device and in any type."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batching import is_readable
from ..distances import TO_BASE_2, exponents, measure_into
from ..matrices import Ridge, add_ridge, row_sums
from ..precision import tiny
from ..scratch import scratch
from .tiles import Factor, Kept, Landmarks, Stack, stacks_of

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = _LINEAR * 0.044715


class Torch:
    """The default backend, and the interface of all others.

    Methods may overwrite what they say they overwrite and nothing else. None of them is
    recorded by autograd.
    """

    has_kernel_gradient: ClassVar[bool] = False
    """Whether `kernel_gradient` is implemented."""

    def takes(self, *tensors: Tensor) -> bool:
        """Whether this backend can compute with all these tensors."""
        return True

    def factors(
        self,
        q: Tensor,
        k: Tensor | None,
        landmarks: Tensor,
        scale: float,
        tile_tokens: int,
        kept: Kept | None = None,
        keep: bool = False,
    ) -> tuple[list[Stack], Factor, Factor]:
        """P_q and P_k, as objects that multiply by them without forming all of them.

        A backend with fused products returns one stack of all matrices and factors with the
        methods of `Factor`.

        Args:
            q: (images, heads, n, d) queries.
            k: (images, heads, l, d) keys, or None if they are the queries.
            landmarks: (b, m, d), b = images * heads.
            scale: Multiplies tokens and landmarks before they are compared.
            tile_tokens: Tokens in a tile, counted over all matrices of the stack.
            kept: What the forward pass kept for this backward pass.
            keep: Whether this is a forward pass that a backward pass may follow.

        Returns:
            Parts of the stack of matrices, to be treated one after the other; P_q; P_k, which
            is P_q itself if k is None.
        """
        stacks, compared = stacks_of(q, k, tile_tokens), Landmarks(landmarks, scale)
        common = (compared, stacks[0].size, tile_tokens, keep)
        p_q, p_k = kept or (None, None)
        queries = Factor(self.kernel_of_tokens, q, *common, p_q, "kernel of queries")
        if k is None:
            return stacks, queries, queries
        return stacks, queries, Factor(self.kernel_of_tokens, k, *common, p_k, "kernel of keys")

    def kernel_of_tokens(
        self, tokens: Tensor, centre: Tensor, columns: Tensor, out: Tensor
    ) -> None:
        """2^(-|x - y|^2 / 2) of x = tokens - centre and landmarks y, one tile of P^T.

        Args:
            tokens: (b, n, d).
            centre: (b, 1, d).
            columns: (b, m, d + 2), see `columns_of`.
            out: (b, m, n), where the result is written.
        """
        b, n, d = tokens.shape
        rows = scratch("rows", tokens, b, n, d + 2)  # [x, 1, |x|^2]
        x, norms = rows.narrow(2, 0, d), rows.select(2, d + 1)
        torch.linalg.vector_norm(measure_into(x, tokens, centre), dim=-1, out=norms)
        norms.square_()
        rows.select(2, d).fill_(1)
        torch.bmm(columns, rows.mT, out=out)
        out.clamp_(max=0).exp2_()

    def kernel_matrix(self, x: Tensor, y: Tensor | None, scale: float) -> Tensor:
        """exp(-|scale (x_i - y_j)|^2 / 2), (..., n, m); if y is None, of x with itself."""
        kernel = exponents(x, y, scale * TO_BASE_2).exp2_()
        if y is not None:
            return kernel
        kernel = torch.maximum(kernel, kernel.mT)  # symmetric to the last bit
        if torch.compiler.is_compiling():  # exporters do not support changes in place
            diagonal = torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
            return torch.where(diagonal, 1, kernel)
        kernel.diagonal(dim1=-2, dim2=-1).fill_(1)
        return kernel

    def inverse(self, a: Tensor, ridge: Ridge, definite: bool = False) -> Tensor:
        """The inverse of A + ridge I, (..., m, m), by Cholesky's factor.

        A matrix that is singular to working precision, or has an inverse beyond the type's range,
        gets as much ridge as rounding asks for, unless all are known to be definite.
        """
        a = add_ridge(a, ridge)
        factor, failed = torch.linalg.cholesky_ex(a)
        if definite:
            return torch.cholesky_inverse(factor)
        singular = (failed > 0) | (factor.diagonal(dim1=-2, dim2=-1).amin(-1) < tiny(a.dtype))
        if is_readable(singular) and not singular.any():
            inverse = torch.cholesky_inverse(factor)
            singular = ~inverse.isfinite().flatten(-2).all(-1)
            if not singular.any():
                return inverse
        rounding = torch.finfo(a.dtype).eps * a.shape[-1] * row_sums(a).squeeze(-1)
        factor, _ = torch.linalg.cholesky_ex(add_ridge(a, rounding * singular.unsqueeze(-1)))
        return torch.cholesky_inverse(factor)

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        """GELU of a contiguous tensor, in one of torch's forms: `none` or `tanh`."""
        if approximate == "tanh":
            return _gate(x).mul_(x)
        return F.gelu(x)

    def gelu_backward(self, grad: Tensor, x: Tensor, approximate: str) -> Tensor:
        """The gradient of x; may overwrite that of the result."""
        if approximate != "tanh":
            gradient: Tensor = torch.ops.aten.gelu_backward(grad, x)
            return gradient
        # x g(x) has the slope g + x g (1 - g) (2u)'.
        gate = _gate(x)
        slope = x.square().mul_(3 * _CUBIC).add_(_LINEAR).mul_(x)
        slope.mul_(torch.sub(1, gate)).add_(1)
        return slope.mul_(gate).mul_(grad)

    def kernel_gradient(self, v: Tensor, grad: Tensor, weight: Tensor) -> Tensor | None:
        """The weight's gradient in a convolution whose channels share one kernel per head.

        Args:
            v: (b, h, w, dim) values.
            grad: (b, h, w, dim), the gradient of the result.
            weight: (heads, 1, k, k).

        Returns:
            The gradient of the weight; None for sizes that are left to autograd.
        """
        return None


def _gate(x: Tensor) -> Tensor:
    """sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3): then GELU is x sigmoid(2u)."""
    return x.square().mul_(_CUBIC).add_(_LINEAR).mul_(x).sigmoid_()
