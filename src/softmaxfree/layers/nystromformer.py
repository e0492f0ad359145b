"""Nyströmformer: softmax through averaged tokens. Xiong et al., 2021, arXiv 2102.03902."""

from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..ops.precision import compute_dtype, tiny, without_autocast
from .multihead import Layout, MultiHeadAttention, dropped_to_zero
from .samplers import AvgSampler, sample_grid
from .softmax import masked_softmax


class NystromformerAttention(MultiHeadAttention):
    """Three small softmax matrices in place of a large one, the middle one inverted.

    With landmarks Q' and K' of queries and keys,

        softmax(Q K^T)  ~  softmax(Q K'^T) softmax(Q' K'^T)^+ softmax(Q' K^T)

    Landmarks are averages: of squares of an image, as in the SOFT paper, or of segments of a
    sequence, as in Nyströmformer's.

    Args:
        dim, num_heads: Width of the tokens, and heads that divide it.
        ratio, num_landmarks: How many landmarks, as in `SoftmaxFreeAttention`.
        iters: Steps of the pseudo-inverse.
        others: Of `MultiHeadAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        ratio: int = 8,
        num_landmarks: int | None = None,
        iters: int = 6,
        tie_qk: bool = False,
        pad: str = "replicate",
        **others: Any,
    ) -> None:
        super().__init__(dim, num_heads, tie_qk=tie_qk, **others)
        if iters < 1:
            raise UserError(f"iters must be at least 1, got {iters}")
        self.iters = iters
        self.sampler = AvgSampler(self.head_dim, self.ndim, ratio, num_landmarks, pad)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        mask, prefix = layout.mask, self.prefix_tokens
        sampled = sample_grid(self.sampler, q, layout.size, layout.query_mask, prefix)
        q_landmarks, q_kept = sampled
        if k is not q:
            sampled = sample_grid(self.sampler, k, layout.context_size, mask, prefix)
        k_landmarks, k_kept = sampled
        scale = self.head_dim**-0.5
        with without_autocast(q):
            to_landmarks = _softmax(q * scale, k_landmarks, None, k_kept)  # (B, heads, N, m)
            middle = _softmax(q_landmarks * scale, k_landmarks, q_kept, k_kept)
            from_landmarks = _softmax(q_landmarks * scale, dropped_to_zero(k, mask), q_kept, mask)
            inverse = softmax_pinv(middle, self.iters)
            values = dropped_to_zero(v, mask).to(from_landmarks.dtype)
            return (to_landmarks @ (inverse @ (from_landmarks @ values))).to(v.dtype)


def _softmax(x: Tensor, y: Tensor, x_kept: Tensor | None, y_kept: Tensor | None) -> Tensor:
    """softmax(x y^T), (B, heads, n, m): 0 in rows and columns that the masks drop."""
    dtype = compute_dtype(x, y)
    weights = masked_softmax(x.to(dtype) @ y.to(dtype).mT, y_kept)
    return weights if x_kept is None else weights.masked_fill(~x_kept[:, None, :, None], 0)


def softmax_pinv(a: Tensor, iters: int) -> Tensor:
    """Computes the pseudo-inverse of a (..., m, l) by steps of third order, Razavi et al.:

        Z <- Z (13 - A Z (15 - A Z (7 - A Z))) / 4

    The start is A^T over the product of each matrix's own norms. (The authors' code takes the
    largest norms of the batch, so that a sample's result depends on its batch-mates.)
    """
    norms = a.abs().sum(-1).amax(-1) * a.abs().sum(-2).amax(-1)
    z = a.mT / norms.clamp(min=tiny(a.dtype))[..., None, None]
    identity = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    for _ in range(iters):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z
