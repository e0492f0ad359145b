"""What contestants claim to compute, as their papers write it: every matrix formed, float64.

The code that is checked is used only for the positions of landmarks and for random features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.multihead import Layout
from ...layers.registry import build_attention
from ...ops import reference
from ...ops.kernel import token_scale

SIZE, DIM, HEADS = (8, 6), 12, 2


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def softmax_free(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return reference.softmax_free_attention(q, q, v, landmarks)


@dataclass(frozen=True)
class Claim:
    """A formula of a layer's queries, keys and values (B, heads, N, d).

    options: Options of the checked layer with which the method has a closed form.
    """

    formula: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-8


def layer_error(name: str) -> float:
    """Relative error of one of this package's layers against its claim."""
    claim = LAYERS[name]
    torch.manual_seed(0)
    options = {"num_landmarks": 4, "ratio": 2, "max_size": SIZE} | claim.options
    layer: Any = build_attention(name, DIM, HEADS, **options).double().eval()
    x = torch.randn(2, math.prod(SIZE), DIM, dtype=torch.float64)
    source = _reduced(layer, x) if name == "spatial_reduction" else x
    q, k, v = (
        _heads(projection(tokens), HEADS)
        for projection, tokens in ((layer.q, x), (layer.k or layer.q, source), (layer.v, source))
    )
    expected = layer.proj(_merged(claim.formula(layer, q, k, v)))
    return relative_error(layer(x, SIZE), expected)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _reduced(layer: Any, x: Tensor) -> Tensor:
    image = x.mT.unflatten(2, SIZE)
    weight = layer.reduction.weight
    small = F.conv2d(image, weight, layer.reduction_bias, stride=weight.shape[-1])
    small = F.adaptive_avg_pool2d(small, 2)
    return layer.reduction_norm(small.flatten(2).mT)


def _softmax(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def _soft(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = token_scale(q.shape[-1])
    landmarks, _ = layer.sample(q, SIZE, None)
    landmarks = layer.landmark_norm(landmarks * scale) / scale
    return reference.softmax_free_attention(q, k, v, landmarks, layer.normalize)


def _gaussian(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.gaussian_attention(q, q, v, layer.normalize)


def _linformer(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _softmax(layer, q, layer.mix_keys @ k, layer.mix_values @ v)


def _performer(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return random_features(q, k, v, layer.projection)


def random_features(q: Tensor, k: Tensor, v: Tensor, directions: Tensor) -> Tensor:
    """Weights phi(q) phi(k)^T, each row of them divided by its sum."""

    def features(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        x = x / x.shape[-1] ** 0.25
        along = torch.einsum("bhnd,fd->bhnf", x, directions)
        shift = along.amax(axes, keepdim=True)
        return torch.exp(along - x.square().sum(-1, keepdim=True) / 2 - shift) + 1e-4

    weights = features(q, (-1,)) @ features(k, (-2, -1)).mT
    return weights / weights.sum(-1, keepdim=True) @ v


def _nystromformer(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With enough steps for the iteration to reach the pseudo-inverse."""

    def pooled(x: Tensor) -> Tensor:
        image = x.mT.unflatten(-1, SIZE).flatten(0, 1)
        return F.adaptive_avg_pool2d(image, 2).flatten(2).mT.unflatten(0, x.shape[:2])

    return nystrom_softmax(q, k, v, pooled(q), pooled(k), torch.linalg.pinv)


def nystrom_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    pinv: Callable[[Tensor], Tensor],
) -> Tensor:
    def softmax(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.mT / math.sqrt(x.shape[-1])).softmax(-1)

    middle = pinv(softmax(q_landmarks, k_landmarks))
    return softmax(q, k_landmarks) @ middle @ softmax(q_landmarks, k) @ v


def shared_qk(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees all others: keys have length 1, and a token's own score is masked."""
    scores = q @ F.normalize(q, dim=-1).mT / math.sqrt(q.shape[-1])
    scores.diagonal(dim1=-2, dim2=-1).fill_(-5e4)
    return scores.softmax(-1) @ v


def _skyformer(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    landmarks, _ = layer.draw(q, k, Layout(SIZE, SIZE, None, None))
    return reference.softmax_free_attention(q, k, v, landmarks, False, layer.ridge)


LAYERS: dict[str, Claim] = {
    "soft": Claim(_soft),
    "softpp": Claim(_soft),
    "softmax": Claim(_softmax),
    "linformer": Claim(_linformer),
    "spatial_reduction": Claim(_softmax),
    "performer": Claim(_performer),
    "nystromformer": Claim(_nystromformer, {"iters": 60}, 1e-5),
    "reformer": Claim(shared_qk, {"bucket": math.prod(SIZE)}),
    "skyformer": Claim(_skyformer),
    "gaussian": Claim(_gaussian),
}
"""Claims of this package's layers."""


def _projected(layer: Any, x: Tensor, *projections: nn.Module) -> list[Tensor]:
    return [_heads(projection(x), layer.heads) for projection in projections]


def _linformer_package(layer: Any, x: Tensor) -> Tensor:
    q, k, v = _projected(layer, x, layer.to_q, layer.to_k, layer.to_v)
    return layer.to_out(_merged(_softmax(layer, q, layer.proj_k.T @ k, layer.proj_v.T @ v)))


def _nystrom_package(layer: Any, x: Tensor) -> Tensor:
    """Six steps of its own pseudo-inverse."""
    q, k, v = (_heads(y, layer.heads) for y in layer.to_qkv(x).chunk(3, -1))
    q_means, k_means = (y.unflatten(-2, (layer.num_landmarks, -1)).mean(-2) for y in (q, k))

    def pinv(a: Tensor) -> Tensor:
        z = a.mT / (a.abs().sum(-1).max() * a.abs().sum(-2).max())
        one = torch.eye(a.shape[-1], dtype=a.dtype)
        for _ in range(layer.pinv_iterations):
            z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
        return z

    return layer.to_out(_merged(nystrom_softmax(q, k, v, q_means, k_means, pinv)))


def _performer_package(layer: Any, x: Tensor) -> Tensor:
    q, k, v = _projected(layer, x, layer.to_q, layer.to_k, layer.to_v)
    directions = layer.fast_attention.projection_matrix
    return layer.to_out(_merged(random_features(q, k, v, directions)))


def _reformer_package(layer: Any, x: Tensor) -> Tensor:
    qk, v = _projected(layer, x, layer.toqk, layer.tov)
    return layer.to_out(_merged(shared_qk(layer, qk, qk, v)))


PACKAGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linformer": _linformer_package,
    "nystrom_attention": _nystrom_package,
    "performer_pytorch": _performer_package,
    "reformer_pytorch": _reformer_package,
}
"""Claims of other packages' layers, computed with their weights."""
