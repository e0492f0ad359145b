"""The small matrices that softmax-free attention is made of."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.attention import SoftmaxFreeAttention
from ..layers.multihead import Layout
from ..ops.attention import LEAST_SUM, middle_matrix, with_weights, without_dropped
from ..ops.distances import exponents
from ..ops.kernel import kernel_matrix, token_scale
from ..ops.precision import compute_dtype, without_autocast


class Factors(NamedTuple):
    """S = P Z P_keys^T of every image and head: the matrix that the layer applies to its values.

    | | P | Z | P_keys |
    |---|---|---|---|
    | SOFT | k(Q, L) | A^+ | k(K, L) |
    | SOFT++ | k(Q, L) | D^-1/2 A^+ D^-1/2 | k(K, L) |
    | these with `rows` | each row divided by that of S w | the same | each row times its weight w |
    | softx | rows sum to 1 | the identity | weighted columns, which sum to 1 |

    S itself, with a row and a column for every token, is never formed.
    """

    P: Tensor
    """(B, heads, N, m), of queries and landmarks."""
    P_keys: Tensor
    """(B, heads, L, m), of keys and landmarks, 0 for masked keys; P itself if it is the same."""
    A: Tensor | None
    """(B, heads, m, m), the kernel of landmarks; None if nothing is inverted."""
    A_inverse: Tensor | None
    """(B, heads, m, m), the inverse of A plus a ridge, as the layer computes it."""
    D: Tensor | None
    """(B, heads, m), the row sums of A that SOFT++ normalises with; None for others."""
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
    dtype, scale = compute_dtype(q, k, landmarks), token_scale(q.shape[-1])
    log_weights = attention.log_weights(k.to(dtype))
    landmarks, queries = landmarks.to(dtype), q.to(dtype) * scale
    keys = queries if k is q else k.to(dtype) * scale
    mask = None if layout.mask is None else layout.mask.unsqueeze(1)  # (B, 1, L): for all heads
    if kept is not None:
        kept = kept.unsqueeze(1)  # (B, 1, m)
        landmarks = landmarks.masked_fill(~kept.unsqueeze(-1), 0)
    with without_autocast(q):
        if attention.middle == "sums":
            return _smoothers(queries, keys, landmarks, log_weights, mask, kept)
        found = _through_inverse(attention, queries, keys, landmarks, mask, kept)
        if not attention.rows:
            return found
        ones = keys.new_ones(*keys.shape[:-1], 1)
        weights = with_weights(ones, log_weights, mask)[..., -1:]  # (B, heads, L, 1)
        sums = found.attend(weights).clamp(min=LEAST_SUM)
        return found._replace(P=found.P / sums, P_keys=found.P_keys * weights)


def _through_inverse(
    attention: SoftmaxFreeAttention,
    q: Tensor,
    k: Tensor,
    landmarks: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
) -> Factors:
    """Of SOFT and SOFT++, for tokens that are scaled."""

    def kernel(tokens: Tensor) -> Tensor:
        values = kernel_matrix(tokens, landmarks)
        return values if kept is None else values * kept.unsqueeze(-2)

    p = kernel(q)
    p_keys = p if k is q else kernel(k)
    if mask is not None:
        p_keys = p_keys.masked_fill(~mask.unsqueeze(-1), 0)
    a = kernel_matrix(landmarks)
    if kept is not None:
        a = without_dropped(a, kept)
    inverse, z = (
        middle_matrix(a, attention.inversion, normalize, kept)
        for normalize in (False, attention.normalize)
    )
    return Factors(p, p_keys, a, inverse, a.sum(-1) if attention.normalize else None, z)


def _smoothers(
    q: Tensor,
    k: Tensor,
    landmarks: Tensor,
    log_weights: Tensor | None,
    mask: Tensor | None,
    kept: Tensor | None,
) -> Factors:
    """Of two softmaxes of negative squared distances: their sums cannot underflow to 0."""
    wide = q.dtype if q.device.type == "mps" else torch.float64  # which mps does not have
    to_landmarks, of_keys = (exponents(x.to(wide), landmarks.to(wide), 1.0) for x in (q, k))
    if log_weights is not None:
        of_keys = of_keys + log_weights.unsqueeze(-1)
    p = _softmax(to_landmarks, -1, None if kept is None else kept.unsqueeze(-2))
    p_keys = _softmax(of_keys, -2, None if mask is None else mask.unsqueeze(-1))
    if kept is not None:
        p_keys = p_keys * kept.unsqueeze(-2)
    m = landmarks.shape[-2]
    identity = torch.eye(m, dtype=q.dtype, device=q.device).expand(*p.shape[:-2], m, m)
    return Factors(p.to(q.dtype), p_keys.to(q.dtype), None, None, None, identity)


def _softmax(x: Tensor, dim: int, kept: Tensor | None) -> Tensor:
    """Softmax over what is kept; 0 where nothing is."""
    if kept is None:
        return x.softmax(dim)
    return x.masked_fill(~kept, torch.finfo(x.dtype).min / 4).softmax(dim) * kept
