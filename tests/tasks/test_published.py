"""The weights that come with the package under a name of timm's."""

import json
import os
from pathlib import Path

import pytest
import timm
import torch
from cifar10 import CLASSES
from PIL import Image
from publish import TEST_SETS, card, page, publish
from safetensors import safe_open
from timm.data import create_transform, resolve_data_config
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from softmaxfree.models.variants import PUBLISHED

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("images", TEST_SETS)
def test_weights_score_what_their_card_says(name: str, images: str) -> None:
    """By timm's own words alone, as somebody would who knows nothing of this package."""
    folder = Path(os.environ.get("SOFTMAXFREE_DATA", "")) / TEST_SETS[images]
    if not folder.is_dir():
        pytest.skip(f"{TEST_SETS[images]} is not in $SOFTMAXFREE_DATA")
    model = timm.create_model(name, pretrained=True).eval()
    dataset = ImageFolder(str(folder), create_transform(**resolve_data_config({}, model=model)))
    assert tuple(dataset.classes) == model.pretrained_cfg["label_names"]
    right = 0
    with torch.inference_mode():
        for batch, targets in DataLoader(dataset, batch_size=500):
            right += int((model(batch).argmax(1) == targets).sum())
    assert right / len(dataset) == pytest.approx(card(name)["accuracy"][images], abs=0.001)
    assert right / len(dataset) >= 0.86


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_are_small_and_nothing_but_half_precision(name: str) -> None:
    assert PUBLISHED[name].stat().st_size < 3e6
    with safe_open(PUBLISHED[name], framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    wide = {key for key, tensor in tensors.items() if tensor.dtype != torch.float16}
    assert all(key.endswith("num_batches_tracked") for key in wide)
    assert set(tensors) == set(timm.create_model(name).state_dict())


def test_a_model_with_weights_is_float32_and_takes_timms_changes() -> None:
    name = "softpp_nano.cifar10"
    trained = timm.create_model(name, pretrained=True).eval()
    assert trained.num_classes == 10
    assert trained.head.weight.dtype == torch.float32
    body = "stages.2.blocks.0.mlp.fc1.weight"
    for changes in (
        {"num_classes": 7},
        {"in_chans": 1},
        {"img_size": 64},
        {"features_only": True},
    ):
        model = timm.create_model(name, pretrained=True, **changes)
        weights = {key.removeprefix("model."): tensor for key, tensor in model.named_parameters()}
        assert torch.equal(weights[body], trained.get_parameter(body))
    images = torch.randn(2, 3, 48, 48)
    larger = timm.create_model(name, pretrained=True, img_size=48).eval()
    torch.testing.assert_close(larger(images), trained(images), rtol=1e-4, atol=1e-4)


def test_without_the_tag_a_model_is_as_it_was() -> None:
    model = timm.create_model("softpp_nano")
    assert model.num_classes == 1000
    assert model.pretrained_cfg["tag"] == "untrained"


def test_the_page_of_cards_is_what_the_files_say() -> None:
    assert (ROOT / "docs/weights.md").read_text() == page()


def test_a_run_is_published_as_it_will_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, file = "softpp_nano.cifar10", tmp_path / "published.safetensors"
    monkeypatch.setitem(PUBLISHED, name, file)
    for i, label in enumerate(CLASSES):
        for folder in TEST_SETS.values():
            (tmp_path / folder / label).mkdir(parents=True)
            Image.new("RGB", (32, 32), (25 * i, 128, 0)).save(tmp_path / folder / label / "0.png")
    monkeypatch.setenv("SOFTMAXFREE_DATA", str(tmp_path))
    model = timm.create_model("softpp_nano", num_classes=10)
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.arange(10.0)  # says truck to everything
    weights = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    checkpoint = {
        "hyper_parameters": {"backbone": "softpp_nano"}, "state_dict": weights, "epoch": 2
    }  # fmt: skip
    torch.save(checkpoint, tmp_path / "last.ckpt")
    (tmp_path / "run.json").write_text(json.dumps({"scores": {}}))
    (tmp_path / "config.yaml").write_text("seed_everything: 7")
    assert publish(tmp_path) == name
    told = card(name)
    assert (told["epochs"], told["seed"]) == (3, 7)
    assert told["accuracy"] == {"all": 0.1, "half": 0.1}
    assert told["sizes"] == {"48": 0.1, "64": 0.1}
    with safe_open(file, framework="pt") as written:
        assert torch.equal(written.get_tensor("head.bias"), torch.arange(10.0).half())


def test_a_run_that_cannot_be_published_is_refused(tmp_path: Path) -> None:
    checkpoint = {"hyper_parameters": {"backbone": "softpp_tiny"}, "state_dict": {}, "epoch": 0}
    torch.save(checkpoint, tmp_path / "last.ckpt")
    (tmp_path / "run.json").write_text(json.dumps({"commit": "x"}))
    with pytest.raises(ValueError, match=r"is of softpp_tiny\.cifar10; weights are published of"):
        publish(tmp_path)
    checkpoint["hyper_parameters"] = {"backbone": "softpp_nano"}
    torch.save(checkpoint, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="has not ended; go on with `softmaxfree fit --checkpoint"):
        publish(tmp_path)
