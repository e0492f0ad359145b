"""RetinaNet and Mask R-CNN over backbones of timm: sizes, levels, gradients, what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from softmaxfree.models.build import BackboneConfig
from softmaxfree.models.detectors import build_detector

from .test_backbones import images

PAPER = {
    ("retinanet", "softpp_tiny_fudan"): 23, ("retinanet", "softpp_small"): 38,
    ("retinanet", "softpp_medium"): 59, ("retinanet", "softpp_large"): 98,
    ("mask_rcnn", "softpp_tiny_fudan"): 32, ("mask_rcnn", "softpp_small"): 48,
    ("mask_rcnn", "softpp_medium"): 69, ("mask_rcnn", "softpp_large"): 106,
}  # fmt: skip
"""Millions of parameters that the paper prints; its tiny is the released one."""

TARGET = {
    "boxes": torch.tensor([[8.0, 8, 60, 70], [20, 30, 90, 90]]),
    "labels": torch.tensor([1, 2]),
    "masks": torch.zeros(2, 96, 128, dtype=torch.uint8),
}
TARGET["masks"][:, 30:60, 20:60] = 1


def small(
    detector: str, backbone: BackboneConfig | str = "softpp_nano", **arguments: Any
) -> nn.Module:
    return build_detector(detector, 3, backbone, width=32, min_size=96, max_size=160, **arguments)


@pytest.mark.parametrize(("detector", "backbone"), PAPER)
def test_parameters_are_the_papers_within_3_percent(detector: str, backbone: str) -> None:
    with torch.device("meta"):
        model = build_detector(detector, 80, backbone)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(PAPER[detector, backbone], rel=0.03)


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_everything_learns(detector: str) -> None:
    model = small(detector)
    losses = model([images(3, 96, 128), images(3, 80, 100)], [TARGET, TARGET])
    assert ("loss_mask" in losses) == (detector == "mask_rcnn")
    sum(losses.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_five_levels_and_anchors_by_their_strides(detector: str) -> None:
    model = small(detector).eval()
    levels = list(model.backbone(images(1, 3, 128, 128)).values())
    first = 4 if detector == "retinanet" else 2
    assert [level.shape[-1] for level in levels] == [128 // first // 2**i for i in range(5)]
    generator = getattr(model, "anchor_generator", None) or model.rpn.anchor_generator
    smallest = [sizes[0] for sizes in generator.sizes]
    assert smallest == [16 * 2**i for i in range(5)]


@pytest.mark.parametrize(
    "backbone", ["pvt_v2_b0", "swin_tiny_patch4_window7_224", "resnet10t", "convnext_atto"]
)
def test_any_pyramid_of_timm_stands_in(backbone: str) -> None:
    model = small("retinanet", backbone).eval()
    with torch.no_grad():
        (found,) = model([images(3, 75, 131).sigmoid()])
    assert found["boxes"].shape[1:] == (4,)


def test_another_attention_in_ours_and_in_timms() -> None:
    for backbone in ("softpp_nano", "swin_tiny_patch4_window7_224"):
        model = small("retinanet", BackboneConfig(backbone, attention="linformer"))
        assert any("Linformer" in type(module).__name__ for module in model.modules())


def test_a_model_without_a_pyramid_is_refused() -> None:
    with pytest.raises(ValueError, match="3 maps, each of half the side"):
        small("retinanet", "vit_tiny_patch16_224")
    with pytest.raises(ValueError, match="must be one of retinanet, mask_rcnn, got 'yolo'"):
        small("yolo")
