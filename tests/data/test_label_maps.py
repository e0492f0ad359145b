"""Images with a class for every pixel: what they are read from, and what is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from softmaxfree.data import label_maps
from softmaxfree.data.digit_scenes import DigitScenes
from softmaxfree.data.image_files import ImageFileError
from softmaxfree.data.label_maps import IGNORE, LabelMaps, generated_palette, open_label_maps

from .test_image_files import write_photo

CAMVID: dict[str, Any] = {
    "image_folder": "{split}",
    "label_folder": "{split}annot",
    "classes": [
        "sky", "building", "pole", "road", "pavement", "tree",
        "signsymbol", "fence", "car", "pedestrian", "bicyclist",
    ],
    "ignore": [11],
    "palette": [
        (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (0, 0, 192), (128, 128, 0),
        (192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192),
    ],
}  # fmt: skip


def save(path: Path, *values: int, mode: str = "L") -> Path:
    """A row of pixels; images are as wide as their labels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new(mode, (len(values), 1))
    image.putdata(values if mode in "LP" else [(value,) * 3 for value in values])
    if mode == "P":
        image.putpalette(bytes(range(30)))
    image.save(path)
    return path


def write_folders(root: Path, count: int = 4) -> Path:
    """images/train/N.jpg and labels/train/N.png with the values 0, 1, 255."""
    for number in range(count):
        save(root / "images/train" / f"{number}.jpg", 0, 90, 200, mode="RGB")
        save(root / "labels/train" / f"{number}.png", 0, 1, 255)
    return root


def open_folders(root: Path, split: str = "train", **options: Any) -> LabelMaps:
    return open_label_maps("folders", str(root), split, **{"classes": ["sky", "road"]} | options)


def labels_of(maps: LabelMaps, index: int = 0) -> list[int]:
    image, labels = maps.load(index)
    assert image.mode == "RGB"
    assert labels.dtype == torch.uint8
    assert labels.shape == (image.height, image.width)
    return labels.flatten().tolist()


def test_digits_have_their_pixels_and_the_background_the_rest() -> None:
    maps, scenes = open_label_maps("digit_scenes", None, "val"), DigitScenes("val")
    assert len(maps) == 200
    assert maps.classes == ["background", *"0123456789"]
    assert len(set(maps.palette)) == 11
    assert maps.describe(3) == "digit_scenes[3]"
    for index in range(20):
        image, labels = maps.load(index)
        scene, objects = scenes.load(index)
        assert image.tobytes() == scene.tobytes()
        assert labels.dtype == torch.uint8
        assert objects.masks is not None
        for digit, mask in zip(objects.labels, objects.masks.bool()):
            assert (labels[mask] == digit + 1).all()
        assert (labels > 0).sum() == objects.masks.sum()


def test_folders_are_paired_by_name(tmp_path: Path) -> None:
    maps = open_folders(write_folders(tmp_path))
    assert len(maps) == 4
    assert maps.classes == ["sky", "road"]
    assert maps.palette == generated_palette(2)
    assert maps.describe(2) == str(tmp_path / "images/train/2.jpg")
    assert labels_of(maps) == [0, 1, IGNORE]


def test_labels_may_have_a_suffix_and_a_palette_of_their_own(tmp_path: Path) -> None:
    save(tmp_path / "raw" / "a.PNG", 1, 2)
    save(tmp_path / "raw" / "b.jpeg", 1, 2)
    save(tmp_path / "raw" / ".c.png", 1, 2)
    save(tmp_path / "masks" / "a_L.png", 1, 0, mode="P")
    save(tmp_path / "masks" / "b_L.png", 0, 1, mode="P")
    save(tmp_path / "masks" / "b_colours.png", 0, 1, mode="RGB")
    colours = [(1, 2, 3), (4, 5, 6)]
    maps = open_folders(
        tmp_path, "", image_folder="raw", label_folder="masks", label_suffix="_L", palette=colours
    )
    assert [labels_of(maps, index) for index in range(2)] == [[1, 0], [0, 1]]
    assert maps.palette == colours


def test_values_to_ignore_are_no_classes(tmp_path: Path) -> None:
    save(tmp_path / "images" / "a.png", 0, 1, 2, 3, 9)
    save(tmp_path / "labels" / "a.png", 0, 1, 2, 3, 9)
    maps = open_folders(tmp_path, "", classes=["sky", "road", "car"], ignore=[0, 9])
    assert labels_of(maps) == [IGNORE, 0, 1, 2, IGNORE]


@pytest.mark.parametrize(
    ("given", "folder"),
    [("train", "training"), ("training", "train"), ("validation", "val"), ("valid", "validation")],
)
def test_a_split_is_found_by_its_other_usual_name(given: str, folder: str, tmp_path: Path) -> None:
    save(tmp_path / "images" / folder / "a.png", 0)
    save(tmp_path / "labels" / folder / "a.png", 0)
    assert len(open_folders(tmp_path, given)) == 1


@pytest.mark.parametrize("split", ["train", "training", ""])
def test_ade20k_has_its_classes_from_1_on(split: str, tmp_path: Path) -> None:
    folder = "training" if split else ""
    save(tmp_path / "images" / folder / "ADE_1.jpg", 0, 0, 0)
    save(tmp_path / "annotations" / folder / "ADE_1.png", 0, 1, 150)
    maps = open_label_maps("ade20k", str(tmp_path), split)
    assert labels_of(maps) == [IGNORE, 0, 149]
    assert len(maps.palette) == len(set(maps.classes)) == 150
    assert [maps.classes[n] for n in (0, 1, 2, 44, 149)] == [
        "wall", "building", "sky", "chest of drawers", "flag",
    ]  # fmt: skip
    assert maps.palette[2] == (6, 230, 230)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("labelIds", [0, 7, 9, 11, 29, 33], [IGNORE, 0, IGNORE, 2, IGNORE, 18]),
        ("labelTrainIds", [0, 18, 255], [0, 18, IGNORE]),
    ],
)
def test_cityscapes_has_19_classes(
    kind: str, values: list[int], expected: list[int], tmp_path: Path
) -> None:
    for city in ("aachen", "ulm"):
        save(tmp_path / "leftImg8bit/train" / city / f"{city}_0_leftImg8bit.png", *values)
        labels = tmp_path / "gtFine/train" / city
        save(labels / f"{city}_0_gtFine_labelIds.png", *[0] * len(values))
        save(labels / f"{city}_0_gtFine_{kind}.png", *values)
        save(labels / f"{city}_0_gtFine_color.png", *values, mode="RGB")
    maps = open_label_maps("cityscapes", str(tmp_path), "train")
    assert len(maps) == 2
    assert labels_of(maps, 1) == expected
    assert len(maps.classes) == len(maps.palette) == 19
    assert maps.classes[:3] + maps.classes[-2:] == [
        "road", "sidewalk", "building", "motorcycle", "bicycle",
    ]  # fmt: skip
    assert maps.palette[0] == (128, 64, 128)


def test_generated_colours_differ() -> None:
    colours = torch.tensor(generated_palette(150))
    assert generated_palette(11) == generated_palette(150)[:11]
    assert colours.min() >= 0
    assert colours.max() <= 255
    for count, distance in ((11, 70), (150, 20)):
        apart = torch.pdist(colours[:count].float(), p=1)
        assert apart.min() > distance


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda root: (root / "labels/train/1.png").unlink(),
            r"1 of 4 images have no label that ends in \.png in .*labels/train: .*train/1\.jpg;",
        ),
        (
            lambda root: save(root / "labels/train/9.png", 0),
            r"1 of 5 labels have no image in .*images/train: .*train/9\.png;",
        ),
        (
            lambda root: save(root / "labels/train/2.png", 0, 1),
            r"the image .*2\.jpg has 3 x 1 pixels, but its label .*2\.png has 2 x 1",
        ),
        (
            lambda root: save(root / "labels/train/2.png", 0, 2, 7),
            r"the label .*2\.png has the value 2, but with 2 classes values may be 0 to 1 and 255",
        ),
        (
            lambda root: save(root / "labels/train/2.png", 0, 1, 1, mode="RGB"),
            r"the label .*2\.png is of Pillow's mode RGB: save it with one channel",
        ),
        (
            lambda root: save(root / "images/train/2.png", 0, 1, 1),
            r"2\.jpg and .*2\.png have the same name: rename one",
        ),
        (
            lambda root: (root / "images/train").rename(root / "images/dev"),
            "no split 'train', which takes the folders images/train, labels/train: .* are none",
        ),
        (
            lambda root: [
                (root / kind / "train").rename(root / kind / "dev") for kind in ("images", "labels")
            ],
            "no split 'train', which takes .*: the splits there are dev",
        ),
        (
            lambda root: [file.unlink() for file in root.rglob("*.*")],
            r"images/train has no images whose names end in \.jpg, .*: the folders in it are none",
        ),
    ],
)
def test_what_is_wrong_with_folders_is_said_in_one_sentence(
    change: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    change(write_folders(tmp_path))
    with pytest.raises(ValueError, match=sentence) as caught:
        open_folders(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"classes": []}, "0 classes are given, but it takes 1 to 255: .* --data.classes"),
        ({"classes": [*map(str, range(256))]}, "256 classes are given"),
        ({"classes": ["a", "b", "a"]}, "'a' is the name of several classes: give each its own"),
        ({"ignore": [256]}, "labels never have the value 256 to ignore: give 0 to 255"),
        ({"palette": [(0, 0, 0)]}, "1 colours are given for 2 classes"),
        ({"label_suffix": "_L"}, r"4 of 4 images have no label that ends in _L\.png .*2\.jpg \.\."),
        (
            {"image_folder": "images"},
            "the folders images, labels/{split} are those of all splits, not of 'train' alone",
        ),
        ({"split": ""}, "images has no images whose .*: the folders in it are train"),
        ({"image_folder": "{split}/{split}", "split": "dev"}, "the splits there are none"),
    ],
)
def test_options_of_folders_that_do_not_fit_are_refused(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write_folders(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        open_folders(tmp_path, **options)


@pytest.mark.parametrize(
    ("name", "split", "options", "sentence"),
    [
        (
            "pascal",
            "train",
            {},
            "no data set of label maps .*: take one of digit_scenes, ade20k, cityscapes, folders",
        ),
        ("ade20k", "train", {"ignore": [0]}, "ade20k takes no ignore: only the data set folders"),
        ("ade20k", "train", {}, "needs its folder: give it with --data.root"),
        ("digit_scenes", "dev", {}, "digit_scenes has no split 'dev'"),
    ],
)
def test_what_is_no_data_set_is_refused(
    name: str, split: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        open_label_maps(name, None, split, **options)


def test_of_many_labels_some_are_checked_at_the_start_and_all_when_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_maps, "_ALL", 8)
    monkeypatch.setattr(label_maps, "_SOME", 3)
    write_folders(tmp_path, 9)
    for number in (3, 4):
        save(tmp_path / "labels/train" / f"{number}.png", 0, 1, 7)
    with pytest.raises(ValueError, match=r"3\.png has the value 7"):
        open_folders(tmp_path)  # checks 0, 3 and 6
    save(tmp_path / "labels/train" / "3.png", 0, 1, 1)
    with pytest.raises(ValueError, match=r"4\.png has the value 7"):
        open_folders(tmp_path).load(4)
    save(tmp_path / "images/train" / "4.jpg", 0, 0)
    with pytest.raises(ValueError, match=r"4\.jpg has 2 x 1 pixels"):
        open_folders(tmp_path)  # sizes are checked in all


@pytest.mark.parametrize("kind", ["header", "data"])
def test_files_that_cannot_be_read_fail_when_they_are_asked_for(kind: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 2, (64, 64), dtype=np.uint8)
    for number in range(3):
        for folder, end in (("images", "jpg"), ("labels", "png")):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.fromarray(noise).save(tmp_path / folder / f"{number}.{end}")
    for file in ("images/1.jpg", "labels/2.png"):
        content = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(b"" if kind == "header" else content[: len(content) // 2])
    maps = open_folders(tmp_path, "")
    assert labels_of(maps) == noise.flatten().tolist()
    with pytest.raises(ImageFileError, match="or damaged"):
        maps.load(1)
    with pytest.raises(ImageFileError, match=r"its label .*2\.png cannot be read"):
        maps.load(2)


def open_real(name: str, root: str, split: str, **options: Any) -> LabelMaps:
    if not (Path(os.environ.get("SOFTMAXFREE_DATA", "")) / root).is_dir():
        pytest.skip(f"{root} is not in the folder that SOFTMAXFREE_DATA names")
    return open_label_maps(name, root, split, **options)


@pytest.mark.parametrize(("split", "count"), [("train", 74), ("val", 26)])
def test_real_street_scenes_are_read(split: str, count: int) -> None:
    maps = open_real("folders", "camvid", split, **CAMVID)
    assert len(maps) == count
    seen = [_classes(maps.load(index)[1], (360, 480)) for index in range(count)]
    assert set().union(*seen) == {*range(11), IGNORE}
    with pytest.raises(ValueError, match=r"has the value 11, but .* may be 0 to 10 and 255"):
        open_real("folders", "camvid", split, **{**CAMVID, "ignore": [255]})


def test_real_scenes_of_ade20k_are_read() -> None:
    maps = open_real("ade20k", "ade20k_3", "")
    assert len(maps) == 3
    sizes = [(512, 683), (364, 500), (300, 400)]
    for index, size in enumerate(sizes):
        image, labels = maps.load(index)
        assert (image.height, image.width) == size
        names = {maps.classes[n] for n in _classes(labels, size) - {IGNORE}}
        assert {"wall", "building", "sky", "tree"} <= names


def _classes(labels: Tensor, size: tuple[int, int]) -> set[int]:
    assert labels.shape == size
    return set(labels.unique().tolist())


@pytest.mark.parametrize(
    "options", [{"image_folder": "../x/{split}"}, {"label_folder": "/{split}"}]
)
def test_folders_are_below_the_root(options: dict[str, str], tmp_path: Path) -> None:
    write_folders(tmp_path / "root")
    with pytest.raises(ValueError, match="is no name of a file below"):
        open_folders(tmp_path / "root", **options)
    with pytest.raises(ValueError, match="is no name of a file below"):
        open_folders(tmp_path / "root", "..")


@pytest.mark.parametrize("upright", [True, False])
@pytest.mark.parametrize("end", ["jpg", "png", "tiff"])
def test_labels_are_of_the_size_that_people_see_or_that_the_file_has(
    end: str, upright: bool, tmp_path: Path
) -> None:
    photo = write_photo(tmp_path / "images/train" / f"0.{end}", 6)
    width, height = (32, 16) if upright else (16, 32)
    if end == "tiff" and not upright:
        return  # Pillow gives those upright alone
    (tmp_path / "labels/train").mkdir(parents=True)
    Image.new("L", (width, height), 1).save(tmp_path / "labels/train/0.png")
    image, labels = open_folders(tmp_path).load(0)
    assert image.size == (width, height)
    assert labels.shape == (height, width)
    assert photo.exists()
