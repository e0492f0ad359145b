"""UperNet and its peers over backbones of timm: sizes, gradients, what is refused."""

import pytest
import torch

from softmaxfree.models.build import BackboneConfig
from softmaxfree.models.segmenters import DECODERS, build_segmenter

from .test_backbones import images

PAPER = {"softpp_small": 60, "softpp_medium": 81, "softpp_large": 121}
"""Millions of parameters of UperNet that the paper prints."""
NARROW = {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}


@pytest.mark.parametrize("backbone", PAPER)
def test_parameters_are_the_papers_within_2_percent(backbone: str) -> None:
    with torch.device("meta"):
        model = build_segmenter("upernet", 150, backbone)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(PAPER[backbone], rel=0.02)


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_decoder_learns_at_any_size(decoder: str) -> None:
    backbone, options = ("softpp_tiny", NARROW)
    if decoder == "setr_pup":
        backbone, options = "softpp_vit_small", {"depth": 2}
    model = build_segmenter(decoder, 5, BackboneConfig(backbone, options=options), width=64)
    logits, second = model(images(2, 3, 70, 99))
    assert second is not None
    assert logits.shape == second.shape == (2, 5, 70, 99)
    (logits.square().mean() + second.square().mean()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    with torch.no_grad():
        assert model.eval()(images(1, 3, 64, 33))[1] is None


def test_the_second_head_can_be_left_out() -> None:
    model = build_segmenter("upernet", 5, "softpp_nano", width=32, auxiliary=False)
    assert model.auxiliary is None
    assert model(images(2, 3, 64, 64))[1] is None


@pytest.mark.parametrize("backbone", ["pvt_v2_b0", "swin_tiny_patch4_window7_224", "resnet10t"])
def test_any_pyramid_of_timm_stands_in(backbone: str) -> None:
    model = build_segmenter("upernet", 5, backbone, width=32).eval()
    with torch.no_grad():
        logits, _ = model(images(1, 3, 75, 131))
    assert logits.shape == (1, 5, 75, 131)


def test_setr_takes_timms_vit_and_upernet_does_not() -> None:
    vit = "vit_tiny_patch16_224"
    with torch.no_grad():
        logits, _ = build_segmenter("setr_pup", 5, vit, width=32).eval()(images(1, 3, 70, 99))
    assert logits.shape == (1, 5, 70, 99)
    with pytest.raises(ValueError, match="4 maps, each of half the side"):
        build_segmenter("upernet", 5, vit)
    with pytest.raises(ValueError, match=r"decoder must be one of upernet, .*, got 'unet'"):
        build_segmenter("unet", 5, "softpp_nano")
    with pytest.raises(ValueError, match="a multiple of 64, got 32"):
        build_segmenter("fpn", 5, "softpp_nano", width=32)
