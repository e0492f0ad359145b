"""SOFT++ as the authors' code computes it: the formula, and whole backbones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.activations import TanhGELU
from ...layers.attention import SoftmaxFreeAttention
from ...layers.mlp import Mlp
from ...layers.multihead import Layout, ValueConv
from ...layers.patches import EmbeddingConv
from ...layers.samplers import Size
from ...models.backbone import check_images
from ...ops.kernel import token_scale


def distances_by_products(x: Tensor, y: Tensor) -> Tensor:
    return x**2 @ torch.ones_like(y) + torch.ones_like(x) @ y**2 - 2 * (x @ y)


def distances_by_sums(x: Tensor, y: Tensor) -> Tensor:
    """The straightforward way to write them."""
    return x.square().sum(-1, keepdim=True) + y.square().sum(-2, keepdim=True) - 2 * (x @ y)


def released(
    q: Tensor,
    v: Tensor,
    landmarks: Tensor,
    distances: Callable[[Tensor, Tensor], Tensor] = distances_by_products,
) -> Tensor:
    """SOFT++ as the released code computes it without its CUDA extension, step by step.

    Squared norms by products with ones, one step size for the whole batch, 20 Newton steps with
    the gradient through all of them, P A^+ formed first. All are (B, heads, ., d).
    """
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


class ReleasedValueConv(ValueConv):
    """With as many channels as heads, and the channels of a head as images of a batch."""

    def forward(self, v: Tensor, size: Size) -> Tensor:
        heads, _, side, _ = self.weight.shape
        images = v.unflatten(-1, (heads, -1)).permute(0, 3, 2, 1).unflatten(-1, size)
        out = F.conv2d(images.flatten(0, 1), self.weight, padding=side // 2, groups=heads)
        return out.unflatten(0, images.shape[:2]).flatten(3).permute(0, 3, 2, 1).flatten(2)


class ReleasedAttention(SoftmaxFreeAttention):
    """SOFT++ by the released formula, operation by operation."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        landmarks, _ = self.sample(q, layout.size, None)
        scale = token_scale(self.head_dim)
        return released(q, v, self.landmark_norm(landmarks * scale) / scale)


AS_RELEASED: dict[type[nn.Module], type[nn.Module]] = {
    SoftmaxFreeAttention: ReleasedAttention,
    ValueConv: ReleasedValueConv,
    Mlp: timm.layers.Mlp,
    EmbeddingConv: timm.layers.ConvNormAct,
}
"""What computes a layer's function as the authors' code does, with the same weights."""


def _in_default_order(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].contiguous(),)


def as_released(name: str, arguments: dict[str, Any]) -> nn.Module:
    """A backbone with the authors' formulas, torch's default memory format and no tiles."""
    model = timm.create_model(name, **({"act_layer": "gelu_tanh"} | arguments))
    model.check = partial(check_images, in_chans=3)
    for stage in model.stages:
        stage.embed.register_forward_pre_hook(_in_default_order)
    for module in model.modules():
        if isinstance(module, Mlp) and type(module.act) is TanhGELU:
            module.act = nn.GELU(approximate="tanh")
        if type(module) in AS_RELEASED:
            module.__class__ = AS_RELEASED[type(module)]
    return model
