"""Images with objects: what is in them, what is left out, and what is said about it."""

import json
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from softmaxfree.data import coco
from softmaxfree.data.coco import CocoScenes
from softmaxfree.data.digit_scenes import DigitScenes
from softmaxfree.data.image_files import ImageFileError
from softmaxfree.data.paths import below
from softmaxfree.data.scenes import Scenes, open_scenes
from softmaxfree.data.sources import Digits
from softmaxfree.errors import UserError

from ..processes import exit_code


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


CAT, DOG = ("cat", 0, 2, 3, 11, 8), ("dog", 0, 1, 1, 1, 1)


def write_voc(
    folder: Path, split: str, *images: list[tuple[str, int, float, float, float, float]]
) -> Path:
    """Images of 20 x 10 pixels; objects are the name, difficult, xmin, ymin, xmax, ymax."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    names = [f"{split}_{number}" for number in range(len(images))]
    (folder / "ImageSets/Main" / f"{split}.txt").write_text("\n".join(names) + "\n")
    for name, objects in zip(names, images):
        Image.new("L", (20, 10)).save(folder / "JPEGImages" / f"{name}.jpg")
        boxes = "".join(
            f"<object><name>{kind}</name><difficult>{difficult}</difficult><part><name>paw</name>"
            f"</part><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
            "</bndbox></object>"
            for kind, difficult, x1, y1, x2, y2 in objects
        )
        size = "<size><width>20</width><height>10</height></size>"
        (folder / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><filename>{name}.jpg</filename>{size}{boxes}</annotation>"
        )
    return folder


@pytest.mark.parametrize("below", ["", "VOC2012", "VOCdevkit/VOC2012"])
def test_voc_counts_pixels_from_one_and_takes_the_last_in(tmp_path: Path, below: str) -> None:
    write_voc(tmp_path / below, "train", [DOG, CAT], [])
    scenes = open_scenes("voc", str(tmp_path), "train")
    assert len(scenes) == 2
    assert scenes.classes == ["cat", "dog"]
    image, (boxes, labels, masks) = scenes.load(0)
    assert image.mode == "RGB"
    assert boxes.tolist() == [[0, 0, 1, 1], [1, 2, 11, 8]]
    assert labels.tolist() == [1, 0]
    assert masks is None
    assert not scenes.has_masks
    assert [scenes.is_empty(index) for index in range(2)] == [False, True]
    boxes, labels, _ = scenes.load(1)[1]
    assert boxes.shape == (0, 4)
    assert labels.shape == (0,)
    assert scenes.describe(1) == str(tmp_path / below / "JPEGImages" / "train_1.jpg")


def test_all_splits_of_voc_have_the_same_classes(tmp_path: Path) -> None:
    write_voc(tmp_path, "train", [CAT])
    write_voc(tmp_path, "val", [DOG])
    assert open_scenes("voc", str(tmp_path), "train").classes == ["cat", "dog"]
    scenes = open_scenes("voc", str(tmp_path), "val", ["dog", "cat"])
    assert scenes.load(0)[1].labels.tolist() == [0]
    with pytest.raises(ValueError, match=r"object 1 of val_0\.xml is of the class 'dog', but the"):
        open_scenes("voc", str(tmp_path), "val", ["cat"])


def test_difficult_objects_of_voc_are_crowds_for_scoring(tmp_path: Path) -> None:
    write_voc(tmp_path, "val", [CAT, ("dog", 1, 5, 5, 30, 30)], [("dog", 1, 1, 1, 5, 5)])
    scenes = open_scenes("voc", str(tmp_path), "val")
    assert len(scenes.load(0)[1].boxes) == 1
    assert scenes.is_empty(1)
    truth = scenes.ground_truth()
    assert truth["images"][1] == {"id": 2, "file_name": "val_1.jpg", "height": 10, "width": 20}
    assert truth["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    cat, dog, _ = truth["annotations"]
    assert cat["bbox"] == [1, 2, 10, 6]
    assert cat["area"] == 60
    assert dog["bbox"] == [4, 4, 16, 6]  # inside of the image
    assert [a["iscrowd"] for a in truth["annotations"]] == [0, 1, 1]


def test_broken_objects_of_voc_are_named_and_left_out(tmp_path: Path) -> None:
    broken = [("cat", 0, 5, 5, 4, 9), ("cat", 0, 21, 1, 25, 5), ("cat", 0, float("nan"), 1, 2, 2)]
    write_voc(tmp_path, "val", [*broken, CAT])
    path = tmp_path / "Annotations" / "val_0.xml"
    path.write_text(
        path.read_text().replace("</annotation>", "<object><name>cat</name></object></annotation>")
    )
    scenes = open_scenes("voc", str(tmp_path), "val")
    no_area = "its box has no area in the image"
    assert scenes.skipped == {
        **{f"object {place} of val_0.xml": no_area for place in (1, 2)},
        "object 3 of val_0.xml": "its box is not four numbers",
        "object 5 of val_0.xml": "its box is not four numbers",
    }
    assert len(scenes.load(0)[1].boxes) == len(scenes.ground_truth()["annotations"]) == 1


def test_voc_takes_the_file_name_or_the_name_in_the_split(tmp_path: Path) -> None:
    write_voc(tmp_path, "val", [CAT], [CAT], [CAT])
    images = tmp_path / "JPEGImages"
    (images / "val_0.jpg").rename(images / "val_0.png")
    (images / "val_1.jpg").rename(images / "photo.jpg")
    xml = tmp_path / "Annotations" / "val_1.xml"
    xml.write_text(xml.read_text().replace("val_1.jpg", "photo.jpg"))
    (images / "val_2.jpg").unlink()
    scenes = open_scenes("voc", str(tmp_path), "val")
    assert [Path(scenes.describe(n)).name for n in range(3)] == [
        "val_0.png",
        "photo.jpg",
        "val_2.jpg",
    ]
    with pytest.raises(ImageFileError, match="there is no such file"):  # only when it is asked for
        scenes.load(2)


def test_an_image_of_another_size_than_annotated_is_refused(tmp_path: Path) -> None:
    write_voc(tmp_path, "val", [CAT])
    Image.new("RGB", (10, 20)).save(tmp_path / "JPEGImages" / "val_0.jpg")
    with pytest.raises(ValueError, match="10 x 20 pixels, but 20 x 10 in its annotation"):
        open_scenes("voc", str(tmp_path), "val").load(0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda root: (root / "ImageSets/Main/val.txt").unlink(), "'val': it has train"),
        (lambda root: (root / "ImageSets/Main/val.txt").write_text("\n"), "has no images"),
        (lambda root: (root / "Annotations/val_0.xml").unlink(), "there is no .*val_0.xml"),
        (lambda root: (root / "Annotations/val_0.xml").write_text("<a>"), "val_0.xml cannot be"),
        (lambda root: (root / "Annotations/val_0.xml").write_text("<a/>"), "give the size"),
        (lambda root: replace_width(root, "²"), "does not give the size"),
        (lambda root: replace_width(root, "0"), "does not give the size"),
        (lambda root: replace_width(root, "9" * 5000), "does not give the size"),
        (
            lambda root: (root / "Annotations/val_0.xml").write_text("<?xml encoding='x'?><a/>"),
            "val_0.xml cannot be read as XML",
        ),
        (lambda root: (root / "JPEGImages").rename(root / "images"), "takes the folders Annot"),
    ],
)
def test_what_is_wrong_with_voc_is_said_in_one_sentence(
    change: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    write_voc(tmp_path, "train", [CAT])
    write_voc(tmp_path, "val", [CAT])
    change(tmp_path)
    with pytest.raises(ValueError, match=sentence) as caught:
        open_scenes("voc", str(tmp_path), "val")
    assert "\n" not in str(caught.value)


def replace_width(root: Path, width: str) -> None:
    xml = root / "Annotations" / "val_0.xml"
    xml.write_text(re.sub("<width>.*</width>", f"<width>{width}</width>", xml.read_text()))


def test_one_of_several_data_sets_in_a_folder_is_asked_for(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        write_voc(tmp_path / year, "val", [CAT])
    with pytest.raises(ValueError, match=r"several data sets: give one of .*VOC2007, .*VOC2012"):
        open_scenes("voc", str(tmp_path), "val")


@pytest.mark.parametrize(("split", "count"), [("train", 205), ("val", 87), ("test", 72)])
def test_real_blood_cells_are_read(split: str, count: int) -> None:
    scenes = open_real("voc", "bccd", split)
    assert len(scenes) == count
    assert scenes.classes == ["Platelets", "RBC", "WBC"]
    assert not scenes.skipped
    image, (boxes, labels, _) = scenes.load(count - 1)
    assert image.size == (640, 480)
    assert len(boxes) == len(labels) > 0
    assert (boxes[:, :2] < boxes[:, 2:]).all()


SQUARE = [[2, 2, 6, 2, 6, 6, 2, 6]]
BLOCK = {"size": [10, 20], "counts": [0, 40, 160]}  # of whole columns, from the left
IMAGE = {"id": 9, "file_name": "9.jpg", "height": 10, "width": 20}
COMPRESSED = {"size": [10, 20], "counts": "0X1P5"}


def write_coco(root: Path, *annotations: dict[str, Any], **changed: list[Any]) -> Path:
    """Images 7 and 9 of 20 x 10 pixels, and annotations of image 9 unless they tell another."""
    (root / "annotations").mkdir(exist_ok=True)
    (root / "val2017").mkdir(exist_ok=True)
    images = [
        {"id": number, "file_name": f"{number}.jpg", "height": 10, "width": 20} for number in (9, 7)
    ]
    for image in images:
        Image.new("L", (20, 10)).save(root / "val2017" / str(image["file_name"]))
    usual = {"image_id": 9, "category_id": 3, "bbox": [2, 2, 4, 4], "segmentation": SQUARE}
    content = {
        "images": images,
        "annotations": [{"id": n, **usual, **each} for n, each in enumerate(annotations)],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}],
    }
    file = root / "annotations" / "instances_val2017.json"
    file.write_text(json.dumps({**content, **changed}))
    return file


def open_coco(root: Path, *annotations: dict[str, Any], **options: Any) -> Scenes:
    pytest.importorskip("pycocotools")
    write_coco(root, *annotations)
    return open_scenes("coco", str(root), "val2017", **options)


def test_coco_has_labels_in_the_order_of_its_categories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over_the_edge = {"category_id": 90, "bbox": [15.5, -1, 10, 5]}
    scenes = open_coco(tmp_path, {}, over_the_edge)
    assert capsys.readouterr().out == ""
    assert scenes.classes == ["car", "toothbrush"]
    assert scenes.category_ids == [3, 90]
    assert scenes.image_ids == [7, 9]
    assert scenes.describe(1) == str(tmp_path / "val2017" / "9.jpg")
    image, (boxes, labels, _) = scenes.load(1)
    assert image.mode == "RGB"
    assert boxes.tolist() == [[2, 2, 6, 6], [15.5, 0, 20, 4]]
    assert labels.tolist() == [0, 1]
    assert [scenes.is_empty(index) for index in range(2)] == [True, False]
    boxes, labels, masks = scenes.load(0)[1]
    assert boxes.shape == (0, 4)
    assert masks is not None
    assert masks.shape == (0, 10, 20)


def test_coco_takes_the_order_of_given_classes(tmp_path: Path) -> None:
    scenes = open_coco(tmp_path, {}, {"category_id": 90}, classes=["toothbrush", "car"])
    assert scenes.load(1)[1].labels.tolist() == [1, 0]
    assert scenes.ground_truth()["categories"][0] == {"id": 90, "name": "toothbrush"}


@pytest.mark.parametrize("mask", [BLOCK, COMPRESSED], ids=["counts", "compressed counts"])
def test_masks_of_coco_are_polygons_or_rle(tmp_path: Path, mask: dict[str, Any]) -> None:
    _, objects = open_coco(tmp_path, {}, {"segmentation": mask}).load(1)
    assert objects.masks is not None
    assert objects.masks.dtype == torch.uint8
    square, block = objects.masks
    assert square[2:6, 2:6].all()
    assert square.sum() == 16
    assert block[:, :4].all()
    assert block.sum() == 40


def test_masks_of_coco_are_not_read_where_not_asked_for_or_not_there(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    for scenes in (
        open_coco(tmp_path, {"segmentation": [[1, 2]]}, masks=False),
        open_coco(tmp_path, {"segmentation": []}),
    ):
        assert not scenes.has_masks
        assert not scenes.skipped
        assert scenes.load(1)[1].masks is None
        assert "segmentation" not in scenes.ground_truth()["annotations"][0]


def test_crowds_are_in_the_ground_truth_only(tmp_path: Path) -> None:
    crowd = {"image_id": 7, "iscrowd": 1, "area": 40, "segmentation": BLOCK}
    scenes = open_coco(tmp_path, {}, crowd)
    assert scenes.is_empty(0)
    assert len(scenes.load(0)[1].boxes) == 0
    truth = scenes.ground_truth()
    assert truth["annotations"] == [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [2, 2, 4, 4], **crowd},
        {
            "id": 2,  # as given, but for the numbers, and what the file leaves out
            "image_id": 9,
            "category_id": 3,
            "bbox": [2, 2, 4, 4],
            "area": 16,
            "iscrowd": 0,
            "segmentation": SQUARE,
        },
    ]


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ({"bbox": [2, 2, 0, 4]}, "its box has no area in the image"),
        ({"bbox": [25, 2, 4, 4]}, "its box has no area in the image"),
        ({"bbox": [2, 2, 4]}, "its box is not four numbers"),
        ({"bbox": [2, 2, 4, None]}, "its box is not four numbers"),
        ({"bbox": [2, 2, 4, 4], "segmentation": []}, "it has no mask"),
        ({"segmentation": [*SQUARE, [1, 1, 2, 2]]}, "a polygon of its mask is not three or more"),
        ({"segmentation": [[1, 1, 2, 2, 3, 3, 4]]}, "a polygon of its mask is not three or more"),
        ({"segmentation": SQUARE[0]}, "its mask is neither polygons nor RLE"),
        ({"segmentation": {**BLOCK, "size": [20, 10]}}, r"size \[20, 10\], its image \[10, 20\]"),
        ({"segmentation": {**BLOCK, "counts": [0, 40]}}, "does not count the pixels"),
        ({"segmentation": {**BLOCK, "counts": "0X1"}}, "does not count the pixels"),
        ({"segmentation": {**BLOCK, "counts": ""}}, "does not count the pixels"),
        ({"segmentation": {**BLOCK, "counts": [0.0, 40, 160]}}, "does not count the pixels"),
        ({"segmentation": {**BLOCK, "counts": ["0", 40, 160]}}, "does not count the pixels"),
        ({"segmentation": {**BLOCK, "counts": [-40, 80, 160]}}, "does not count the pixels"),
        ({"segmentation": {**BLOCK, "counts": "0X1P5\0"}}, "does not count the pixels"),
        ({"segmentation": {**BLOCK, "counts": "o" * 9 + "0X1P5"}}, "does not count the pixels"),
        ({"segmentation": {**BLOCK, "size": [10.0, 20]}}, r"size \[10\.0, 20\], its image"),
        ({"segmentation": {**BLOCK, "counts": 5}}, "its mask is neither polygons nor RLE"),
        ({"segmentation": "all"}, "its mask is neither polygons nor RLE"),
        ({"bbox": [2, 2, math.nan, 4]}, "its box is not four numbers"),
        ({"bbox": [2, 2, math.inf, 4]}, "its box is not four numbers"),
        ({"bbox": [2.5, 2, 10**400, 4]}, "its box is not four numbers"),
        ({"area": "4"}, "its area is not a number"),
        ({"iscrowd": [1]}, "its iscrowd is neither 0 nor 1"),
    ],
)
def test_broken_annotations_of_coco_are_named_and_left_out(
    annotation: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    scenes = open_coco(tmp_path, {}, annotation)
    assert list(scenes.skipped) == ["annotation 1 of 9.jpg"]
    assert re.search(reason, scenes.skipped["annotation 1 of 9.jpg"])
    assert len(scenes.load(1)[1].boxes) == len(scenes.ground_truth()["annotations"]) == 1


def test_images_of_coco_that_cannot_be_read_fail_when_they_are_asked_for(tmp_path: Path) -> None:
    scenes = open_coco(tmp_path, {})
    file = Path(scenes.describe(1))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ImageFileError, match="or damaged"):
        scenes.load(1)
    file.unlink()
    with pytest.raises(ImageFileError, match="there is no such file"):
        scenes.load(1)


FAR = [math.nan, math.inf, -math.inf, 1e9, -1e9, 1e300, 10**400, "2", None, [2], {}]


@pytest.mark.parametrize("place", [0, 3, 7])
def test_polygons_that_would_end_the_process_are_left_out(tmp_path: Path, place: int) -> None:
    """pycocotools checks no coordinate: it is asked in another process."""
    polygons = [[*SQUARE[0][:place], value, *SQUARE[0][place + 1 :]] for value in FAR]
    zigzag = [[x * 90_000, n] for n in range(100) for x in (-1, 1)]
    polygons.append([number for pair in zigzag for number in pair])

    def use() -> None:
        scenes = open_coco(tmp_path, {}, *({"segmentation": [polygon]} for polygon in polygons))
        assert list(scenes.skipped) == [
            f"annotation {n + 1} of 9.jpg" for n in range(len(polygons))
        ]
        assert len(scenes.load(1)[1].boxes) == 1
        assert len(scenes.ground_truth()["annotations"]) == 1

    assert exit_code(use) == 0


def test_polygons_beyond_the_image_are_taken(tmp_path: Path) -> None:
    beyond = [[-90_000, -90_000, 90_000, -90_000, 90_000, 90_000, -90_000, 90_000]]
    scenes = open_coco(tmp_path, {"segmentation": beyond})
    masks = scenes.load(1)[1].masks
    assert masks is not None
    assert masks.all()


def test_masks_that_fill_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco, "_MOST_BYTES", 500)
    assert len(open_coco(tmp_path, *[{}] * 2).load(1)[1].boxes) == 2
    with pytest.raises(UserError, match="its 3 masks take"):
        open_coco(tmp_path, *[{}] * 3).load(1)


def test_polygons_that_take_a_minute_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco, "_LONGEST_OF_IMAGE", 1_500_000)
    beyond = [[-90_000, -90_000, 90_000, -90_000, 90_000, 90_000, -90_000, 90_000]]
    assert len(open_coco(tmp_path, *[{"segmentation": beyond}] * 2).load(1)[1].boxes) == 2
    with pytest.raises(UserError, match="its polygons are too long"):
        open_coco(tmp_path, *[{"segmentation": beyond}] * 3).load(1)


@pytest.mark.parametrize(
    "name", ["../9.jpg", "/etc/hostname", "a/../../9.jpg", "", "9\0.jpg"], ids=repr
)
def test_images_of_coco_are_below_its_folder(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    write_coco(tmp_path, images=[{"id": 9, "file_name": name, "height": 10, "width": 20}])
    with pytest.raises(UserError, match=r"is no name of a file below .*val2017"):
        open_scenes("coco", str(tmp_path), "val2017")


@pytest.mark.parametrize("name", ["../photo", "/etc/hostname"])
def test_images_of_voc_are_below_its_folder(name: str, tmp_path: Path) -> None:
    write_voc(tmp_path, "val", [CAT])
    (tmp_path / "photo.xml").write_text((tmp_path / "Annotations/val_0.xml").read_text())
    (tmp_path / "ImageSets/Main/val.txt").write_text(f"{name}\n")
    with pytest.raises(UserError, match=r"is no name of a file below .*Annotations"):
        open_scenes("voc", str(tmp_path), "val")


def test_a_name_in_the_xml_of_voc_leaves_no_folder(tmp_path: Path) -> None:
    write_voc(tmp_path, "val", [CAT])
    xml = tmp_path / "Annotations" / "val_0.xml"
    xml.write_text(xml.read_text().replace("val_0.jpg", "../../outside.jpg"))
    scenes = open_scenes("voc", str(tmp_path), "val")
    assert scenes.describe(0) == str(tmp_path / "JPEGImages/val_0.jpg")


def test_names_of_voc_need_not_be_in_utf_8(tmp_path: Path) -> None:
    write_voc(tmp_path, "val", [CAT])
    name = os.fsdecode(b"caf\xe9")
    for folder, end in (("JPEGImages", "jpg"), ("Annotations", "xml")):
        (tmp_path / folder / f"val_0.{end}").rename(tmp_path / folder / f"{name}.{end}")
    (tmp_path / "ImageSets/Main/val.txt").write_bytes(b"caf\xe9\n")
    scenes = open_scenes("voc", str(tmp_path), "val")
    assert scenes.load(0)[0].size == (20, 10)
    assert scenes.describe(0).endswith("caf\\xe9.jpg")


def test_annotations_of_an_image_that_is_not_there_are_left_out(tmp_path: Path) -> None:
    scenes = open_coco(tmp_path, {}, {"image_id": 8})
    assert scenes.skipped == {"annotation 1 of image 8": "instances_val2017.json has no such image"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda file: file.rename(file.with_stem("instances_mini")), "the splits there are mini"),
        (lambda file: (file.parents[1] / "val2017").rename(file.parents[1] / "val"), "no folder"),
        (lambda file: file.write_text("{"), "not in COCO's format: Expecting property name"),
        (lambda file: file.write_text("[]"), "not in COCO's format: it is not an object of lists"),
        (lambda file: file.write_text("{}"), "not in COCO's format: there is no 'images'"),
        (lambda file: write_coco(file.parents[1], images=[{"id": 1}]), "there is no 'file_name'"),
        (lambda file: write_coco(file.parents[1], images=[]), "has no images"),
        (lambda file: write_coco(file.parents[1], images={}), "its images are not a list"),
        (lambda file: write_coco(file.parents[1], images=[5]), "of its images there is no object"),
        (
            lambda file: write_coco(file.parents[1], images=[IMAGE | {"height": "10"}]),
            "in record 1 of its images 'height' is '10', and a whole number from 1 to 1000000 is",
        ),
        (lambda file: write_coco(file.parents[1], images=[IMAGE | {"width": 0}]), "'width' is 0"),
        (lambda file: write_coco(file.parents[1], images=[IMAGE | {"id": []}]), "'id' is "),
        (
            lambda file: write_coco(file.parents[1], images=[IMAGE | {"file_name": 5}]),
            "'file_name' is 5, and text is expected",
        ),
        (lambda file: write_coco(file.parents[1], {"category_id": {}}), "'category_id' is {}"),
        (
            lambda file: write_coco(file.parents[1], images=[IMAGE, IMAGE | {"id": "9"}]),
            "ids that are numbers and ids that are text",
        ),
        (lambda file: file.write_text("[" * 200_000), "it is nested too deeply"),
        (lambda file: file.write_text('{"a":' * 200_000), "it is nested too deeply"),
        (lambda file: file.write_bytes(b'{"a": "\xff"}'), "not in COCO's format: 'utf-8' codec"),
        (lambda file: write_coco(file.parents[1], categories=[]), "has no categories"),
        (
            lambda file: write_coco(file.parents[1], {"category_id": 91}),
            "annotation 0 of 9.jpg is of the category 91, but the categories are 3 car, 90 tooth",
        ),
    ],
)
def test_what_is_wrong_with_coco_is_said_in_one_sentence(
    change: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    pytest.importorskip("pycocotools")
    change(write_coco(tmp_path, {}))
    with pytest.raises(ValueError, match=sentence) as caught:
        open_scenes("coco", str(tmp_path), "val2017")
    assert "\n" not in str(caught.value)


def test_a_class_that_coco_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no category 'cat': it has car, toothbrush"):
        open_coco(tmp_path, {}, classes=["cat", "car"])


def test_it_is_said_how_to_install_pycocotools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_coco(tmp_path, {})
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(UserError, match=r"pip install 'softmaxfree\[detection\]'"):
        open_scenes("coco", str(tmp_path), "val2017")


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_masks_of_real_coco_are_those_of_pycocotools(split: str) -> None:
    pytest.importorskip("pycocotools")
    from pycocotools.coco import COCO

    scenes = open_real("coco", "coco_tiny", split)
    assert isinstance(scenes, CocoScenes)
    assert (len(scenes), len(scenes.classes)) == (80, 80)
    assert not scenes.skipped
    truth = COCO(scenes.file)
    assert any(annotation["iscrowd"] for annotation in truth.anns.values())
    for index in range(0, 80, 4):
        image, (boxes, labels, masks) = scenes.load(index)
        annotations = [a for a in truth.imgToAnns[scenes.image_ids[index]] if not a["iscrowd"]]
        assert masks is not None
        assert masks.shape == (len(annotations), image.height, image.width)
        assert len(boxes) == len(labels) == len(annotations)
        for annotation, label, mask in zip(annotations, labels, masks.numpy()):
            assert annotation["category_id"] == scenes.category_ids[label]
            assert np.array_equal(truth.annToMask(annotation), mask)


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("name", ["digit_scenes", "coco"])
def test_ground_truth_gives_itself_the_full_score(name: str, kind: str) -> None:
    pytest.importorskip("pycocotools")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    digits = name == "digit_scenes"
    scenes = open_scenes(name, None, "val") if digits else open_real(name, "coco_tiny", "val2017")
    truth, before = COCO(), scenes.load(0)
    truth.dataset = scenes.ground_truth()
    truth.createIndex()
    scored = [{**a, "score": 1.0} for a in truth.dataset["annotations"] if not a["iscrowd"]]
    for result in scored:
        result["segmentation"] = truth.annToRLE(result)
    evaluation = COCOeval(truth, truth.loadRes(scored), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert evaluation.stats[0] > 0.99
    after = scenes.load(0)
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1]))  # scoring writes to it


def open_real(name: str, root: str, split: str) -> Scenes:
    if not (Path(os.environ.get("SOFTMAXFREE_DATA", "")) / root).is_dir():
        pytest.skip(f"{root} is not in the folder that SOFTMAXFREE_DATA names")
    return open_scenes(name, root, split)


@pytest.mark.parametrize(
    ("name", "split", "classes", "sentence"),
    [
        (
            "lvis",
            "train",
            None,
            "no data set of scenes .*: take one of digit_scenes, coco, voc",
        ),
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


@pytest.mark.parametrize("name", ["\ud800", "a/\udfff.jpg"])
def test_a_name_with_half_a_character_is_refused(name: str, tmp_path: Path) -> None:
    """No file can have such a name; JSON can."""
    with pytest.raises(UserError, match="is no name of a file below") as error:
        below(tmp_path, name)
    assert str(error.value).isascii()
