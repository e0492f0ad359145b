"""RetinaNet and Mask R-CNN of torchvision over any pyramid of timm's, ours first."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from ..imports import needs
from .build import BackboneConfig
from .maps import Maps, build_body

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


class Pyramid(Maps):
    """The last maps of a backbone, and torchvision's feature pyramid on them.

    Args:
        body: A model of timm that tells its intermediate maps.
        levels: How many of them, counted from the last.
        width: Channels of the pyramid.
        extra: What makes further levels of the last one.
    """

    def __init__(self, body: nn.Module, levels: int, width: int, extra: ExtraFPNBlock) -> None:
        super().__init__(body, levels)
        self.fpn = FeaturePyramidNetwork(self.channels, width, extra)
        self.out_channels = width

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) -> maps (B, out_channels, h, w) by level."""
        maps = {str(level): x for level, x in enumerate(self.maps(images))}
        levels: dict[str, Tensor] = self.fpn(maps)
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
    backbone: BackboneConfig | str,
    width: int = 256,
    **arguments: Any,
) -> nn.Module:
    """A detector of torchvision's over a backbone of timm's, for images of any size.

    Args:
        width: Channels of the pyramid and of the heads' convolutions.
        arguments: Those of torchvision's class: min_size, max_size, image_mean, image_std, ...
    """
    if detector not in DETECTORS:
        raise UserError(f"detector must be one of {', '.join(DETECTORS)}, got {detector!r}")
    body = build_body(backbone)
    return DETECTORS[detector](body, num_classes, width, **arguments)
