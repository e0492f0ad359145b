"""Reformer: softmax among tokens sorted by a hash. Kitaev et al., 2020, arXiv 2001.04451."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..ops.precision import compute_dtype, without_autocast
from ..ops.tracing import ceil_div
from .multihead import Layout, MultiHeadAttention, dropped_to_zero
from .samplers import _hashed

SELF_SCORE = -5e4
"""Score of a token with itself, so low that it counts only where the token sees no other."""


class ReformerAttention(MultiHeadAttention):
    """Attention within chunks of tokens that are sorted by a locality-sensitive hash.

    Keys are the queries normalised to length 1, so that there is no cross-attention. In every round
    a token sees its chunk and the one before. The rotations of the hash are drawn anew at every
    training step and fixed in evaluation. Sequences are padded to whole chunks; padded and masked
    tokens are sorted last, and no other token sees them. Attention is linear in the number of
    tokens, but hashing into n / bucket buckets is not.

    Args:
        dim, num_heads: Width of the tokens, and heads that divide it.
        bucket: Tokens of a chunk, and of a bucket on average.
        hashes: Rounds of hashing.
        others: Of `MultiHeadAttention`.
    """

    linear: ClassVar[bool] = False
    cross_attention: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        bucket: int = 64,
        hashes: int = 4,
        tie_qk: bool = True,
        **others: Any,
    ) -> None:
        if not tie_qk:
            raise UserError("Reformer's queries are its keys; leave tie_qk out")
        if bucket < 1 or hashes < 1:
            raise UserError(f"bucket and hashes must be at least 1, got {bucket} and {hashes}")
        super().__init__(dim, num_heads, **others)
        self.bucket, self.hashes = bucket, hashes

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        pairs = ceil_div(q.shape[-2], 2 * self.bucket)
        if self.training:
            rotations = torch.randn(self.hashes, pairs, self.head_dim, device=q.device)
        else:
            rotations = fixed_rotations(self.hashes, pairs, self.head_dim, q.device)
        return lsh_attention(q, v, rotations, self.bucket, layout.mask)


def fixed_rotations(hashes: int, pairs: int, width: int, device: torch.device) -> Tensor:
    """Normal numbers (hashes, pairs, width); more pairs leave the first ones as they are."""
    uniform = (_hashed((pairs, 2 * hashes * width), device) + 0.5) / 2**24
    radius, angle = uniform.view(pairs, 2, hashes, width).unbind(1)
    normal = (-2 * radius.log()).sqrt() * torch.cos(2 * math.pi * angle)  # Box and Muller
    return normal.transpose(0, 1)


def lsh_attention(
    qk: Tensor, v: Tensor, rotations: Tensor, bucket: int, mask: Tensor | None
) -> Tensor:
    """Attends from tokens (B, heads, N, d) to tokens that are near them in some round.

    Round r gives o_r = softmax(q k^T / sqrt(d)) v among the tokens that a token sees, and its
    logarithm z_r of the sum of exponentials; the result is the sum of softmax(z)_r o_r.

    Args:
        qk: (B, heads, N, d), queries and keys.
        v: (B, heads, N, d) values.
        rotations: (rounds, pairs, d), at least N / (2 bucket) pairs: directions whose two ends
            are a bucket each.
        bucket: Tokens of a chunk.
        mask: (B, N), True for the tokens to keep.

    Returns:
        (B, heads, N, d).
    """
    n, dtype = qk.shape[-2], compute_dtype(qk, v)
    chunks = ceil_div(n, bucket)
    if mask is None:
        mask = torch.ones(1, n, dtype=torch.bool, device=qk.device)
    mask = mask.expand(qk.shape[0], -1)
    kept = F.pad(mask, (0, chunks * bucket - n))
    padding = (0, 0, 0, chunks * bucket - n)
    tokens = F.pad(dropped_to_zero(qk.to(dtype), mask), padding)
    values = F.pad(dropped_to_zero(v.to(dtype), mask), padding)
    with without_autocast(qk):
        hashed = _hash(tokens.detach(), rotations.to(dtype), bucket, kept)
        results, weights = [], []
        for buckets in hashed.unbind(2):  # (B, heads, N) of one round
            order = buckets.argsort(dim=-1, stable=True)
            out, logits = _attend_chunks(tokens, values, order, chunks, kept)
            back = order.argsort(-1)
            results.append(out.gather(-2, back.unsqueeze(-1).expand_as(out)))
            weights.append(logits.gather(-1, back))
        weight = torch.stack(weights).softmax(0).unsqueeze(-1)
        out = (torch.stack(results) * weight).sum(0)
    # Not as a slice: an exported graph is for all lengths, those without padding too.
    return out.index_select(-2, torch.arange(n, device=out.device)).to(v.dtype)


def _hash(tokens: Tensor, rotations: Tensor, bucket: int, kept: Tensor) -> Tensor:
    """Buckets (B, heads, rounds, N): the nearest end of a direction; dropped tokens come last.

    As many directions count as a sample's kept tokens ask for: what is padded changes nothing.
    """
    pairs = rotations.shape[1]
    needed = ceil_div(kept.sum(-1), 2 * bucket)  # (B,), at most all
    places = torch.einsum("bhnd,rpd->bhrnp", tokens, rotations)
    unused = torch.arange(pairs, device=tokens.device) >= needed[:, None]
    unused = unused[:, None, None, None, :]
    ends = torch.cat([places, -places], -1).masked_fill(torch.cat([unused, unused], -1), -torch.inf)
    return ends.argmax(-1).masked_fill(~kept[:, None, None, :], 2 * pairs)


def _attend_chunks(
    tokens: Tensor, values: Tensor, order: Tensor, chunks: int, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Results (B, heads, N, d) and the logarithms of their weights (B, heads, N), as sorted."""

    def chunked(x: Tensor) -> Tensor:
        x = x.gather(-2, order.unsqueeze(-1).expand(*order.shape, x.shape[-1]))
        return x.unflatten(-2, (chunks, -1))

    q, v = chunked(tokens), chunked(values)  # (B, heads, chunks, bucket, d)
    k = F.normalize(q, dim=-1)
    valid = chunked(kept[:, None, :, None].expand(*order.shape, 1)).squeeze(-1)
    place = order.unflatten(-1, (chunks, -1))

    # The first chunk looks back at the last one that holds a token to keep.
    last = (kept.sum(-1).clamp(min=1) - 1) // place.shape[-1]  # (B,)
    before = torch.arange(-1, chunks - 1, device=order.device).expand(order.shape[0], -1).clone()
    before[:, 0] = last

    def with_chunk_before(x: Tensor) -> Tensor:
        index = before.view(-1, 1, chunks, *[1] * (x.ndim - 3)).expand_as(x)
        return torch.cat([x, x.gather(2, index)], 3)

    k, v, valid_keys = with_chunk_before(k), with_chunk_before(v), with_chunk_before(valid)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(
        place.unsqueeze(-1) == with_chunk_before(place).unsqueeze(-2), SELF_SCORE
    )
    scores = scores.masked_fill(~valid_keys.unsqueeze(-2), torch.finfo(scores.dtype).min)
    total = scores.logsumexp(-1, keepdim=True)
    out = torch.exp(scores - total) @ v
    return out.flatten(2, 3), total.flatten(2)
