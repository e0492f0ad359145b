"""Images with objects: what is in them, what is left out, and what is said about it."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch

from softmaxfree.data.digit_scenes import DigitScenes
from softmaxfree.data.scenes import open_scenes
from softmaxfree.data.sources import Digits

PYCOCOTOOLS = "ignore:__array__ implementation:DeprecationWarning"
"""What its decoding says of numpy 2."""


def test_digit_scenes_are_images_with_boxes_around_masks() -> None:
    scenes = open_scenes("digit_scenes", None, "train")
    assert len(scenes) == 4000
    assert scenes.classes == [str(digit) for digit in range(10)]
    assert scenes.skipped == {}
    for index in range(50):
        image, objects = scenes.load(index)
        assert image.size == (128, 128)
        assert image.mode == "RGB"
        boxes, labels, masks = objects
        assert masks is not None
        assert boxes.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert masks.dtype == torch.uint8
        assert masks.shape == (len(boxes), 128, 128)
        assert 2 <= len(boxes) == len(labels) <= 7
        assert masks.sum(0).max() == 1  # what is in front hides what is behind
        for box, mask in zip(boxes.long().tolist(), masks):
            x1, y1, x2, y2 = box
            inside = mask[y1:y2, x1:x2]
            assert inside.sum() == mask.sum()
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))


def test_digit_scenes_are_a_function_of_split_and_number() -> None:
    states = random.getstate(), np.random.get_state()[1], torch.get_rng_state()
    scenes, again = DigitScenes("train"), DigitScenes("train")
    again.load(5)
    (image, objects), (image_again, objects_again) = scenes.load(7), again.load(7)
    assert image.tobytes() == image_again.tobytes()
    assert all(torch.equal(a, b) for a, b in zip(objects, objects_again))
    assert len({scenes.load(index)[0].tobytes() for index in range(20)}) == 20
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_no_digit_is_in_both_splits_of_the_digit_scenes() -> None:
    train, validation = DigitScenes("train"), DigitScenes("validation")
    assert len(validation) == 200
    assert len(train.digits) == len(Digits("train"))
    assert len(train.digits) + len(validation.digits) == 1797
    drawn = [{image.tobytes() for image, _ in scenes.digits} for scenes in (train, validation)]
    assert not drawn[0] & drawn[1]


@pytest.mark.filterwarnings(PYCOCOTOOLS)
def test_digit_scenes_are_scored_by_their_own_ground_truth() -> None:
    coco_mask = pytest.importorskip("pycocotools.mask")
    scenes = open_scenes("digit_scenes", None, "val")
    truth = json.loads(json.dumps(scenes.ground_truth()))
    assert [image["id"] for image in truth["images"]] == scenes.image_ids
    assert [category["name"] for category in truth["categories"]] == scenes.classes
    assert min(annotation["id"] for annotation in truth["annotations"]) == 1
    counts = Counter(annotation["image_id"] for annotation in truth["annotations"])
    assert set(counts) == set(scenes.image_ids)
    _, (boxes, labels, masks) = scenes.load(3)
    assert masks is not None
    annotations = [a for a in truth["annotations"] if a["image_id"] == scenes.image_ids[3]]
    assert [a["category_id"] for a in annotations] == [label + 1 for label in labels.tolist()]
    for annotation, box, mask in zip(annotations, boxes, masks.numpy()):
        x, y, width, height = annotation["bbox"]
        assert [x, y, x + width, y + height] == box.tolist()
        assert annotation["area"] == mask.sum()
        assert np.array_equal(coco_mask.decode(annotation["segmentation"]), mask)


def test_masks_are_left_out_where_not_asked_for() -> None:
    scenes = open_scenes("digit_scenes", None, "val", masks=False)
    assert not scenes.has_masks
    assert scenes.load(0)[1].masks is None
    assert "segmentation" not in scenes.ground_truth()["annotations"][0]


@pytest.mark.parametrize(
    ("name", "split", "classes", "sentence"),
    [
        ("lvis", "train", None, "no data set of scenes 'lvis': take one of digit_scenes"),
        ("digit_scenes", "dev", None, "digit_scenes has no split 'dev': take one of train"),
        ("digit_scenes", "train", ["cat"], "classes given are cat, those of digit_scenes are 0, 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    name: str, split: str, classes: list[str] | None, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        open_scenes(name, None, split, classes)
    assert "\n" not in str(caught.value)
