"""The attentions that are compared, each as a function of tokens, values and landmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import reference, softmax_free_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens (B, heads, n, d), which are queries and keys, values, landmarks (B, heads, m, d)."""


@dataclass(frozen=True)
class Contestant:
    """An attention, what it is, and how many bytes it needs beyond its inputs for n tokens."""

    attention: Attention
    title: str
    needs: Callable[[int], int] = lambda pairs: 0
    """Bytes, given the number of pairs of tokens over batch and heads, if it forms them all."""


def softpp(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return softmax_free_attention(q, q, v, landmarks)


def released(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """SOFT++ as the released code computes it without its CUDA extension, step by step.

    Squared norms by products with ones, one step size for the whole batch, 20 Newton steps with
    the gradient through all of them, P A^+ formed first.
    """
    return _released(q, v, landmarks, _distances_by_products)


def released_lean(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """The same formula with squared norms by sums: what one would write without much thought."""
    return _released(q, v, landmarks, _distances_by_sums)


def _released(q: Tensor, v: Tensor, landmarks: Tensor, distances: Callable[..., Tensor]) -> Tensor:
    scale = q.shape[-1] ** -0.25
    q, landmarks = q * scale, landmarks * scale
    p = torch.exp(distances(q, landmarks.mT) / -2)
    a = torch.exp(distances(landmarks, landmarks.mT) / -2)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    alpha = 2 / a.sum(-1).max() ** 2
    square = a @ a
    for _ in range(10):
        if (identity - alpha * square).abs().sum(-1).max() <= 1.01:
            break
        alpha = alpha / 2
    z = alpha * a
    for _ in range(20):
        z = 2 * z - z @ a @ z
    root = a.sum(-1).rsqrt()
    z = root.unsqueeze(-1) * z * root.unsqueeze(-2)
    return (p @ z) @ (p.mT @ v)


def _distances_by_products(x: Tensor, y: Tensor) -> Tensor:
    return x**2 @ torch.ones_like(y) + torch.ones_like(x) @ y**2 - 2 * (x @ y)


def _distances_by_sums(x: Tensor, y: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) + y.square().sum(-2, keepdim=True) - 2 * (x @ y)


def fused_softmax(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, v)


def plain_softmax(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return (q @ q.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


CONTESTANTS: dict[str, Contestant] = {
    "softpp": Contestant(softpp, "SOFT++"),
    "released": Contestant(released, "released formula"),
    "released_lean": Contestant(released_lean, "same, norms by sums"),
    "sdpa": Contestant(fused_softmax, "softmax, fused"),
    # Scores and their softmax.
    "softmax": Contestant(plain_softmax, "softmax, plain", lambda pairs: 8 * pairs),
}


def verify() -> None:
    """Every contestant computes what it claims, on a small input in float64."""
    generator = torch.Generator().manual_seed(0)
    q, v = torch.randn(2, 1, 2, 60, 8, dtype=torch.float64, generator=generator)
    landmarks = q[:, :1, ::6]
    q, v = q[:, :1], v[:, :1]
    as_released = softmax_free_attention(q, q, v, landmarks, method="backtrack")
    expected = {
        "softpp": reference.softmax_free_attention(q, q, v, landmarks),
        "released": as_released,
        "released_lean": as_released,
        "sdpa": plain_softmax(q, v, landmarks),
        "softmax": F.scaled_dot_product_attention(q, q, v),
    }
    for name, contestant in CONTESTANTS.items():
        error = (contestant.attention(q, v, landmarks) - expected[name]).norm()
        if error > 1e-8 * expected[name].norm():
            raise RuntimeError(f"{contestant.title} does not compute what it should: {error:.1e}")
