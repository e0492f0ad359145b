"""One line in the libraries that build on timm: segmentation, Hugging Face."""

from pathlib import Path

import pytest
import segmentation_models_pytorch as smp
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from .test_backbones import build, images


def trains(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_unet_of_four_levels() -> None:
    model = smp.Unet(
        "tu-softpp_nano", encoder_weights=None, encoder_depth=4, decoder_channels=(16, 8, 8, 8)
    )
    assert model.eval()(images(1, 3, 32, 48)).shape == (1, 1, 32, 48)


def test_upernet() -> None:
    model = smp.UPerNet("tu-softpp_tiny", encoder_weights=None, classes=5)
    masks = model(images(2, 3, 96, 64))
    assert masks.shape == (2, 5, 96, 64)
    trains(model, masks.square().mean())


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_hugging_faces_wrapper(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = build("softpp_nano")
    save_for_hf(model, tmp_path, safe_serialization=True)
    wrapped = transformers.TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    x = images(2, 3, 40, 40)
    assert torch.equal(wrapped(x).logits, model(x))
    names = [f"class {number}" for number in range(model.num_classes)]
    save_for_hf(model, tmp_path, model_config={"label_names": names}, safe_serialization=True)
    wrapped = transformers.TimmWrapperForImageClassification.from_pretrained(tmp_path)
    assert wrapped.config.id2label[5] == "class 5"
    body = transformers.TimmWrapperModel.from_pretrained(tmp_path).eval()
    assert torch.equal(body(x).last_hidden_state, model.forward_features(x))
