"""Our backbones, computed as the authors' code does."""

from functools import partial
from typing import Any

import timm
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.activations import TanhGELU
from ...layers.attention import SoftmaxFreeAttention
from ...layers.mlp import Mlp
from ...layers.multihead import Layout, ValueConv
from ...layers.patches import EmbeddingConv
from ...layers.registry import register_attention
from ...layers.samplers import Size
from ...models.backbone import check_images
from ...ops.kernel import token_scale
from .contestants import RELEASED
from .operations import released


class ReleasedValueConv(ValueConv):
    """With as many channels as heads, and the channels of a head as images of a batch."""

    def forward(self, v: Tensor, size: Size) -> Tensor:
        heads, _, side, _ = self.weight.shape
        images = v.unflatten(-1, (heads, -1)).permute(0, 3, 2, 1).unflatten(-1, size)
        out = F.conv2d(images.flatten(0, 1), self.weight, padding=side // 2, groups=heads)
        return out.unflatten(0, images.shape[:2]).flatten(3).permute(0, 3, 2, 1).flatten(2)


@register_attention(RELEASED)
class ReleasedAttention(SoftmaxFreeAttention):
    """SOFT++ by the released formula, operation by operation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.value_conv is not None:
            side = self.value_conv.weight.shape[-1]
            self.value_conv = ReleasedValueConv(self.num_heads, side, self.ndim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        landmarks, _ = self.sample(q, layout.size, None)
        scale = token_scale(self.head_dim)
        return released(q, v, self.landmark_norm(landmarks * scale) / scale)


AS_RELEASED: dict[type[nn.Module], type[nn.Module]] = {
    Mlp: timm.layers.Mlp,
    EmbeddingConv: timm.layers.ConvNormAct,
}


def _in_default_order(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].contiguous(),)


def as_released(name: str, arguments: dict[str, Any]) -> nn.Module:
    """A backbone with the authors' formulas, torch's default memory format and no tiles."""
    arguments = {"attention": RELEASED, "act_layer": "gelu_tanh"} | arguments
    model = timm.create_model(name, **arguments)
    model.check = partial(check_images, in_chans=3)
    for stage in model.stages:
        stage.embed.register_forward_pre_hook(_in_default_order)
    for module in model.modules():
        if isinstance(module, Mlp) and type(module.act) is TanhGELU:
            module.act = nn.GELU(approximate="tanh")
        if type(module) in AS_RELEASED:
            module.__class__ = AS_RELEASED[type(module)]
    return model
