"""Performer: softmax's kernel by random features. Choromanski et al., 2020, arXiv 2009.14794."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import UserError
from ..ops.kernel import token_scale
from ..ops.precision import compute_dtype, tiny, without_autocast
from ..ops.tracing import ceil_div
from .multihead import Layout, MultiHeadAttention, dropped_to_zero

EPSILON = 1e-4
"""Added to every feature, as in the authors' code: no query is without keys. With many features,
the largest of which is 1, it makes attention more even than softmax is."""


class PerformerAttention(MultiHeadAttention):
    """FAVOR+: attention through positive orthogonal random features.

    Args:
        dim, num_heads: Width of the tokens, and heads that divide it.
        features: Number of features; d log d for heads of width d if not given.
        redraw: Steps of training, on average, between two draws of the features; 0 for one draw.
            Every step redraws them with probability 1 / redraw, so that a repeated step repeats it.
        others: Of `MultiHeadAttention`.
    """

    equivariant: ClassVar[bool] = True
    unaveraged: ClassVar[tuple[str, ...]] = ("projection",)
    """Buffers that a moving average copies: the mean of several draws is shorter than a draw."""
    projection: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        features: int | None = None,
        redraw: int = 1000,
        tie_qk: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(dim, num_heads, tie_qk=tie_qk, **others)
        if features is not None and features < 1:
            raise UserError(f"features must be at least 1, got {features}")
        if redraw < 0:
            raise UserError(f"redraw must be 0 or more, got {redraw}")
        self.redraw = redraw
        self.features = features or max(1, int(self.head_dim * math.log(self.head_dim)))
        directions = orthogonal_directions(self.features, self.head_dim)
        self.register_buffer("projection", directions.to(torch.get_default_dtype()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        if self.training and self.redraw and torch.rand(()) * self.redraw < 1:
            drawn = orthogonal_directions(self.features, self.head_dim)
            self.projection = drawn.to(self.projection)
        return favor(q, k, v, self.projection, layout.mask)


def orthogonal_directions(count: int, width: int) -> Tensor:
    """Normal vectors (count, width) in float32, orthogonal in blocks of `width` rows."""
    q, r = torch.linalg.qr(torch.randn(ceil_div(count, width), width, width, dtype=torch.float32))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # else some directions are likelier
    directions = q.mT.flatten(0, 1)[:count]
    lengths = torch.randn(count, width, dtype=torch.float32).norm(dim=-1, keepdim=True)
    return directions * lengths


def favor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    mask: Tensor | None,
    epsilon: float = EPSILON,
) -> Tensor:
    """Computes phi(q) (phi(k)^T v), each row divided by phi(q) phi(k)^T 1.

    The features are phi(x)_i = exp(w_i x - |x|^2 / 2), for directions w_i that are rows of
    `projection`. q is (B, heads, N, d), k and v are (B, heads, L, d), projection is (features, d).
    """
    dtype = compute_dtype(q, k, v)
    directions = projection.to(dtype)
    with without_autocast(q):
        queries = _features(q.to(dtype), directions, (-1,), None, epsilon)
        keys = _features(dropped_to_zero(k.to(dtype), mask), directions, (-2, -1), mask, epsilon)
        context = keys.mT @ dropped_to_zero(v.to(dtype), mask)
        total = queries @ keys.sum(-2).unsqueeze(-1)
        return (queries @ context / total.clamp(min=tiny(dtype))).to(v.dtype)


def _features(
    x: Tensor,
    directions: Tensor,
    together: tuple[int, ...],
    mask: Tensor | None,
    epsilon: float,
) -> Tensor:
    """exp(w x - |x|^2 / 2 - c) + epsilon, with c the largest w x along the axes `together`.

    With a mask (B, L) dropped tokens have features 0 and no part in c. The factor exp(-c) would
    cancel if it were not for epsilon, so gradients go through it.
    """
    x = x * token_scale(x.shape[-1])
    exponents = x @ directions.T
    measured = exponents
    if mask is not None:
        dropped = ~mask[:, None, :, None]
        measured = exponents.masked_fill(dropped, torch.finfo(x.dtype).min)
    # Found first and then gathered, so that training keeps places instead of all exponents.
    places = measured.detach().flatten(-len(together)).argmax(-1, keepdim=True)
    largest = measured.flatten(-len(together)).gather(-1, places)
    largest = largest.view(*largest.shape, *[1] * (len(together) - 1))
    half_norms = x.square().sum(-1, keepdim=True) / 2
    features = torch.exp(exponents - half_norms - largest) + epsilon
    return features if mask is None else features.masked_fill(dropped, 0)
