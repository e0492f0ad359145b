"""Attentions as functions of tokens, values and landmarks (B, heads, ., d), without projections."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import softmax_free_attention

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


def softpp(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return softmax_free_attention(q, q, v, landmarks)


def released(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """SOFT++ as the released code computes it without its CUDA extension, step by step.

    Squared norms by products with ones, one step size for the whole batch, 20 Newton steps with
    the gradient through all of them, P A^+ formed first.
    """
    return _released(q, v, landmarks, _distances_by_products)


def released_lean(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """The same formula with squared norms by sums: the straightforward way to write it."""
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
