"""The maps of a backbone that detectors and segmenters build on."""

import inspect
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from .build import BackboneConfig, build_model


class Maps(nn.Module):
    """The last maps of a backbone, each of half the side of the one before.

    Args:
        body: A model of timm that tells its intermediate maps. What comes after the last of them,
            its norm and its head are cut off: they would have no gradients.
        levels: How many maps, counted from the last.
    """

    def __init__(self, body: nn.Module, levels: int) -> None:
        super().__init__()
        info: list[dict[str, Any]] = getattr(body, "feature_info", [])[-levels:]
        self.strides: list[int] = [level["reduction"] for level in info]
        halving = all(b == 2 * a for a, b in zip(self.strides, self.strides[1:]))
        if len(info) < levels or not halving or not hasattr(body, "forward_intermediates"):
            raise UserError(
                f"this needs a backbone with {levels} maps, each of half the side before; "
                f"the strides that {type(body).__name__} tells are {self.strides}"
            )
        self.channels: list[int] = [level["num_chs"] for level in info]
        self.indices: list[int] = body.prune_intermediate_layers(levels, prune_norm=True)  # type: ignore[operator]
        self.body = body

    def maps(self, images: Tensor) -> list[Tensor]:
        """Images (B, 3, H, W) -> maps (B, channels, H / stride, W / stride)."""
        found: list[Tensor] = self.body.forward_intermediates(  # type: ignore[operator]
            images, indices=self.indices, intermediates_only=True
        )
        return found


def build_body(backbone: BackboneConfig | str) -> nn.Module:
    """Builds a backbone of timm without its head, for images of any size."""
    config = BackboneConfig(backbone) if isinstance(backbone, str) else backbone
    body = build_model(config, 0)
    taken = inspect.signature(type(body).__init__).parameters
    for name, value in (("strict_img_size", False), ("dynamic_img_size", True)):  # Swin's, ViT's
        if name in taken:
            return build_model(config.with_options(**{name: value}), 0)
    return body
