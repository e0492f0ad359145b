"""RetinaNet and Mask R-CNN of torchvision over any pyramid of timm's, ours first."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..modules import needs
from .build import build_model

with needs("detection", "a detector"):
    from torchvision.models.detection import MaskRCNN, RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
    from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
    from torchvision.ops.feature_pyramid_network import (
        ExtraFPNBlock,
        LastLevelMaxPool,
        LastLevelP6P7,
    )


class Pyramid(nn.Module):
    """The last maps of a backbone, each of half the side before, and torchvision's FPN on them.

    Args:
        body: A model of timm that tells its intermediate maps.
        levels: How many of them, counted from the last.
        width: Channels of the pyramid.
        extra: What makes further levels of the last one.
    """

    def __init__(self, body: nn.Module, levels: int, width: int, extra: ExtraFPNBlock) -> None:
        super().__init__()
        info: list[dict[str, Any]] = getattr(body, "feature_info", [])[-levels:]
        self.strides = [level["reduction"] for level in info]
        halving = all(b == 2 * a for a, b in zip(self.strides, self.strides[1:]))
        if len(info) < levels or not halving or not hasattr(body, "forward_intermediates"):
            raise ValueError(
                f"a detector needs a backbone with {levels} maps, each of half the side before; "
                f"the strides that {type(body).__name__} tells are {self.strides}"
            )
        # Layers after the last map, and norms and heads, would have no gradients.
        self.indices: list[int] = body.prune_intermediate_layers(levels, prune_norm=True)  # type: ignore[operator]
        self.body = body
        self.fpn = FeaturePyramidNetwork([level["num_chs"] for level in info], width, extra)
        self.out_channels = width

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) -> maps (B, out_channels, h, w) by level."""
        maps: list[Tensor] = self.body.forward_intermediates(  # type: ignore[operator]
            images, indices=self.indices, intermediates_only=True
        )
        levels: dict[str, Tensor] = self.fpn({str(i): x for i, x in enumerate(maps)})
        return levels


def retinanet(body: nn.Module, num_classes: int, width: int, **arguments: Any) -> RetinaNet:
    """RetinaNet on P3 to P7: three maps, and two more convolved from the last.

    Its classes are numbered from 0.
    """
    channels = body.feature_info[-1]["num_chs"]  # type: ignore[index]
    pyramid = Pyramid(body, 3, width, LastLevelP6P7(channels, width))
    # Three sizes an octave from four times the stride: 32 pixels at stride 8.
    sizes = tuple(
        tuple(int(4 * stride * 2 ** (third / 3)) for third in range(3))
        for stride in (pyramid.strides[0] * 2**level for level in range(5))
    )
    return RetinaNet(
        pyramid,
        num_classes,
        anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)),
        size_divisible=pyramid.strides[-1],
        **arguments,
    )


def mask_rcnn(body: nn.Module, num_classes: int, width: int, **arguments: Any) -> MaskRCNN:
    """Mask R-CNN on P2 to P6: four maps, and one more subsampled from the last.

    Its class 0 is the background: classes are numbered from 1.
    """
    pyramid = Pyramid(body, 4, width, LastLevelMaxPool())
    sizes = tuple((8 * pyramid.strides[0] * 2**level,) for level in range(5))
    names = [str(level) for level in range(4)]
    return MaskRCNN(
        pyramid,
        rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)),
        box_roi_pool=MultiScaleRoIAlign(names, output_size=7, sampling_ratio=2),
        box_head=TwoMLPHead(width * 7 * 7, 4 * width),
        box_predictor=FastRCNNPredictor(4 * width, num_classes + 1),
        mask_roi_pool=MultiScaleRoIAlign(names, output_size=14, sampling_ratio=2),
        mask_head=MaskRCNNHeads(width, [width] * 4, 1),
        mask_predictor=MaskRCNNPredictor(width, width, num_classes + 1),
        size_divisible=pyramid.strides[-1],
        **arguments,
    )


DETECTORS: dict[str, Callable[..., nn.Module]] = {"retinanet": retinanet, "mask_rcnn": mask_rcnn}
FIRST_LABEL = {"retinanet": 0, "mask_rcnn": 1}
"""The number that a detector gives the first class."""


def build_detector(
    detector: str,
    num_classes: int,
    backbone: str,
    attention: str | None = None,
    tie_qk: bool | None = None,
    drop_path: float = 0.0,
    options: dict[str, Any] | None = None,
    width: int = 256,
    **arguments: Any,
) -> nn.Module:
    """A detector of torchvision's over a backbone of timm's, for images of any size.

    Args:
        width: Channels of the pyramid and of the heads' convolutions.
        arguments: Those of torchvision's class: min_size, max_size, image_mean, image_std, ...
    """
    if detector not in DETECTORS:
        raise ValueError(f"detector must be one of {', '.join(DETECTORS)}, got {detector!r}")

    def build(**more: Any) -> nn.Module:
        return build_model(backbone, 0, attention, tie_qk, drop_path, {**more, **(options or {})})

    body = build()
    taken = inspect.signature(type(body).__init__).parameters
    if "strict_img_size" in taken:  # Swin's: windows for images of one size only
        body = build(strict_img_size=False)
    return DETECTORS[detector](body, num_classes, width, **arguments)
