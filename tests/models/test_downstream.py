"""One line in the libraries that build on timm: segmentation, detection, Hugging Face."""

from pathlib import Path

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

from .test_backbones import build, images


def trains(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_upernet() -> None:
    model = smp.UPerNet("tu-softpp_tiny", encoder_weights=None, classes=5)
    masks = model(images(2, 3, 96, 64))
    assert masks.shape == (2, 5, 96, 64)
    trains(model, masks.square().mean())


class Pyramid(nn.Module):
    """features_only and torchvision's feature pyramid: the backbone of its detectors."""

    out_channels = 64

    def __init__(self, name: str) -> None:
        super().__init__()
        self.body = timm.create_model(name, features_only=True)
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), self.out_channels)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn({str(i): features for i, features in enumerate(self.body(x))})


TARGET = {
    "boxes": torch.tensor([[8.0, 8, 60, 70], [20, 30, 90, 90]]),
    "labels": torch.tensor([1, 2]),
    "masks": torch.zeros(2, 96, 128, dtype=torch.uint8),
}


@pytest.fixture
def anchors() -> object:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(tuple((8 * 2**i,) for i in range(4)), ((0.5, 1.0, 2.0),) * 4)


def test_retinanet(anchors: object) -> None:
    model = RetinaNet(
        Pyramid("softpp_nano"), 3, min_size=96, max_size=128, anchor_generator=anchors
    )
    losses = model([images(3, 96, 128), images(3, 80, 100)], [TARGET, TARGET])
    trains(model, sum(losses.values()))
    (found,) = model.eval()([images(3, 75, 131)])
    assert found["boxes"].shape[1:] == (4,)


def test_mask_rcnn(anchors: object) -> None:
    pool = [MultiScaleRoIAlign(["0", "1", "2", "3"], size, 2) for size in (7, 14)]
    model = MaskRCNN(
        Pyramid("softpp_nano"), 3, min_size=96, max_size=128, rpn_anchor_generator=anchors,
        box_roi_pool=pool[0], mask_roi_pool=pool[1],
    )  # fmt: skip
    target = TARGET | {"masks": TARGET["masks"].clone()}
    target["masks"][:, 20:60, 20:60] = 1
    losses = model([images(3, 96, 128)], [target])
    assert "loss_mask" in losses
    trains(model, sum(losses.values()))


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_hugging_faces_wrapper(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = build("softpp_nano")
    save_for_hf(model, tmp_path, safe_serialization=True)
    wrapped = transformers.TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    x = images(2, 3, 40, 40)
    assert torch.equal(wrapped(x).logits, model(x))
    body = transformers.TimmWrapperModel.from_pretrained(tmp_path).eval()
    assert torch.equal(body(x).last_hidden_state, model.forward_features(x))
