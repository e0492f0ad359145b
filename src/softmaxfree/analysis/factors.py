"""The small matrices that softmax-free attention is made of."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.attention import SoftmaxFreeAttention
from ..layers.multihead import Layout
from ..ops.attention import middle_matrix, without_dropped
from ..ops.kernel import kernel_matrix, token_scale
from ..ops.precision import compute_dtype, without_autocast


class Factors(NamedTuple):
    """S = P Z P_keys^T of every image and head, with Z = A^+ (SOFT) or D^-1/2 A^+ D^-1/2 (SOFT++).

    S itself, with a row and a column for every token, is never formed.
    """

    P: Tensor
    """(B, heads, N, m), the kernel of queries and landmarks."""
    P_keys: Tensor
    """(B, heads, L, m), the kernel of keys and landmarks, 0 for masked keys; P if k is q."""
    A: Tensor
    """(B, heads, m, m), the kernel of landmarks."""
    A_inverse: Tensor
    """(B, heads, m, m), the inverse of A plus a ridge, as the layer computes it."""
    D: Tensor | None
    """(B, heads, m), the row sums of A that SOFT++ normalises with; None for SOFT."""
    Z: Tensor
    """(B, heads, m, m), the matrix between P and P_keys^T."""

    def attend(self, v: Tensor) -> Tensor:
        """S v: (B, heads, L, e) -> (B, heads, N, e)."""
        return self.P @ (self.Z @ (self.P_keys.mT @ v))

    def rows(self, queries: Sequence[int]) -> Tensor:
        """Rows of S: (B, heads, len(queries), L)."""
        return self.P[..., list(queries), :] @ self.Z @ self.P_keys.mT

    def double(self) -> "Factors":
        """The same numbers in float64, on the CPU."""
        there = {name: x for name, x in self._asdict().items() if x is not None}
        return self._replace(**{name: x.to("cpu", torch.float64) for name, x in there.items()})


@torch.no_grad()
def factors_of(attention: SoftmaxFreeAttention, q: Tensor, k: Tensor, layout: Layout) -> Factors:
    """Computes the factors for queries and keys (B, heads, N, d), at least in float32."""
    landmarks, kept = attention.landmarks(q, k, layout)
    dtype = compute_dtype(q, k, landmarks)
    landmarks = landmarks.to(dtype)
    if kept is not None:
        kept = kept.unsqueeze(1)  # (B, 1, m): the same for all heads
        landmarks = landmarks.masked_fill(~kept.unsqueeze(-1), 0)

    def kernel(tokens: Tensor) -> Tensor:
        values = kernel_matrix(tokens.to(dtype) * token_scale(q.shape[-1]), landmarks)
        return values if kept is None else values * kept.unsqueeze(-2)

    with without_autocast(q):
        p = kernel(q)
        p_keys = p if k is q else kernel(k)
        if layout.mask is not None:
            p_keys = p_keys.masked_fill(~layout.mask[:, None, :, None], 0)
        a = kernel_matrix(landmarks)
        if kept is not None:
            a = without_dropped(a, kept)
        inverse, z = (
            middle_matrix(a, attention.inversion, normalize, kept)
            for normalize in (False, attention.normalize)
        )
    return Factors(p, p_keys, a, inverse, a.sum(-1) if attention.normalize else None, z)
