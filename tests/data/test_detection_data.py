"""Sizes, flips and batches of images with objects."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import masks_to_boxes

from softmaxfree.data import DetectionData
from softmaxfree.data.detection import Augmentation
from softmaxfree.data.digit_scenes import DigitScenes
from softmaxfree.data.scenes import Objects
from softmaxfree.errors import UserError

from .test_scenes import CAT, write_voc


def augmented(scene: tuple[Image.Image, Objects], seed: int = 0, **options: Any) -> Any:
    usual = {"sizes": [128], "max_size": 1333, "flip": 0.0, "vertical_flip": 0.0,
             "color_jitter": 0.0}  # fmt: skip
    torch.manual_seed(seed)
    return Augmentation(**(usual | options))(*scene)


def wide(height: int, width: int) -> tuple[Image.Image, Objects]:
    box = torch.tensor([[10.0, 20.0, 50.0, 60.0]])
    return Image.new("RGB", (width, height)), Objects(box, torch.tensor([3]), None)


def test_the_shorter_side_is_as_asked_unless_the_longer_would_be_too_long() -> None:
    pixels, target = augmented(wide(480, 640), sizes=[800])
    assert pixels.shape == (3, 800, 1066)
    torch.testing.assert_close(target["boxes"], torch.tensor([[10.0, 20, 50, 60]]) * 800 / 480,
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    pixels, _ = augmented(wide(480, 1200), sizes=[800])
    assert pixels.shape[2] == 1333
    assert pixels.shape[1] == pytest.approx(480 * 1333 / 1200, abs=1)


def test_several_sizes_are_all_drawn() -> None:
    sizes = [*range(480, 801, 32)]
    drawn = {augmented(wide(480, 640), seed, sizes=sizes)[0].shape[1] for seed in range(80)}
    assert drawn == set(sizes)


@pytest.mark.parametrize(("option", "axis"), [("flip", -1), ("vertical_flip", -2)])
def test_flips_turn_boxes_and_masks_with_the_image(option: str, axis: int) -> None:
    scene = DigitScenes("train").load(3)
    pixels, target = augmented(scene)
    flipped, flipped_target = augmented(scene, **{option: 1.0})
    assert torch.equal(flipped, pixels.flip(axis))
    assert torch.equal(flipped_target["masks"], target["masks"].flip(axis))
    assert torch.equal(flipped_target["labels"], target["labels"])
    around: Tensor = masks_to_boxes(flipped_target["masks"])
    around[:, 2:] += 1  # its last pixel is in the box
    assert torch.equal(flipped_target["boxes"], around)


def test_masks_are_resized_with_their_boxes() -> None:
    _, target = augmented(DigitScenes("train").load(3), sizes=[200])
    around = masks_to_boxes(target["masks"])
    around[:, 2:] += 1
    assert (target["boxes"] - around).abs().max() <= 2


def test_an_object_that_is_too_small_after_resizing_is_left_out_with_its_label() -> None:
    image = Image.new("RGB", (640, 480))
    boxes = torch.tensor([[10.0, 10, 12, 12], [100, 100, 300, 300]])
    scene = image, Objects(boxes, torch.tensor([1, 2]), torch.ones(2, 480, 640, dtype=torch.uint8))
    _, target = augmented(scene, sizes=[48])
    assert target["labels"].tolist() == [2]
    assert len(target["boxes"]) == len(target["masks"]) == 1


def test_images_without_objects_are_scored_and_not_trained_on(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_voc(tmp_path, split, [CAT], [], [("cat", 1, *CAT[2:])], [CAT])
    data = DetectionData("voc", str(tmp_path), val_split="val", batch_size=2)
    data.setup("fit")
    train, val = data.sources["train"], data.sources["val"]
    assert len(train) == 2  # one is empty, one has only a difficult object
    assert [len(train.load(index)[1].boxes) for index in range(2)] == [1, 1]
    assert train.describe(1).endswith("train_3.jpg")
    assert len(val) == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sizes": [64, 0]}, "--data.sizes must be from 1 to 4096 pixels, got 0"),
        ({"sizes": [10**9]}, "--data.sizes must be from 1 to 4096 pixels, got 1000000000"),
        ({"max_size": 0}, "--data.max_size must be from 1 to 4096 pixels, got 0"),
        ({"max_size": 4097}, "--data.max_size must be from 1 to 4096 pixels, got 4097"),
    ],
)
def test_sides_that_images_cannot_have_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        DetectionData(**options)


def test_none_with_an_object_is_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_voc(tmp_path, split, [], [])
    with pytest.raises(ValueError, match="no image of the training split has an object"):
        DetectionData("voc", str(tmp_path), val_split="val", classes=["cat"]).setup("fit")
