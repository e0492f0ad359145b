"""Annotation files with hostile values in any place: what is left of them is sound, or refused.

Each test runs in another process, for pycocotools checks nothing; the file that ended it is left in
the test's folder. SOFTMAXFREE_FUZZ_CASES sets the number of cases.
"""

import copy
import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from softmaxfree.data.label_maps import open_label_maps
from softmaxfree.data.listops import HEADER, WORDS
from softmaxfree.data.scenes import FileScenes, open_scenes
from softmaxfree.data.sequences import open_sequences
from softmaxfree.errors import UserError

from ..processes import exit_code
from .records import recorded
from .test_images import SETTINGS, is_one_sentence

NAMES = ["../outside.jpg", "/etc/hostname", "a/../../outside.jpg", "", ".", "..", "a\0b", "\x1b[2J"]
SCALARS = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.0, 0.5, -0.5, 1e9, -1e9, 1e300,
    math.nan, math.inf, -math.inf, "1", "nan", "9" * 5000, "x" * 2000, "\ud800", *NAMES,
]  # fmt: skip
HOSTILE = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
COORDINATES = st.floats(-50, 50) | st.floats() | st.integers(-200_000, 200_000)
POLYGONS = st.lists(st.lists(COORDINATES, min_size=4, max_size=16), min_size=1, max_size=3)
COUNTS = st.lists(st.integers(-5, 300), max_size=8) | st.text(max_size=12) | st.text("01PX5o")
MASKS = POLYGONS | st.fixed_dictionaries({"size": st.just([10, 20]), "counts": COUNTS})

SQUARE = [[2, 2, 6, 2, 6, 6, 2, 6]]
COCO = {
    "images": [
        {"id": 7, "file_name": "7.jpg", "height": 10, "width": 20},
        {"id": 9, "file_name": "9.jpg", "height": 10, "width": 20},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [2, 2, 4, 4], "segmentation": SQUARE,
         "area": 16, "iscrowd": 0},
        {"id": 2, "image_id": 9, "category_id": 4, "bbox": [0, 0, 4, 10], "iscrowd": 1,
         "segmentation": {"size": [10, 20], "counts": [0, 40, 160]}},
        {"id": 3, "image_id": 9, "category_id": 4, "bbox": [0, 0, 4, 10],
         "segmentation": {"size": [10, 20], "counts": "0X1P5"}},
    ],
    "categories": [{"id": 3, "name": "car"}, {"id": 4, "name": "cat"}],
}  # fmt: skip


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all values in nested lists and dictionaries."""
    keys = list(content) if isinstance(content, dict) else range(len(content))
    found: list[tuple[Any, ...]] = []
    for key in keys:
        found.append((*path, key))
        if isinstance(content[key], dict | list):
            found += places(content[key], (*path, key))
    return found


@st.composite
def annotations(draw: st.DrawFn) -> Any:
    """A good file with some values replaced, left out or there twice."""
    content: Any = copy.deepcopy(COCO)
    for number in draw(st.lists(st.integers(0, 2), max_size=2)):
        content["annotations"][number]["segmentation"] = copy.deepcopy(draw(MASKS))
    for _ in range(draw(st.integers(0, 3))):
        if not (known := places(content)):
            break
        *path, last = draw(st.sampled_from(known))
        inner = content
        for key in path:
            inner = inner[key]
        if draw(st.booleans()):
            inner[last] = copy.deepcopy(draw(HOSTILE))
        elif isinstance(inner, list):
            inner.append(copy.deepcopy(inner[last]))
        else:
            del inner[last]
    return content


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in (folder / "7.jpg", folder / "9.jpg", folder.parent / "outside.jpg"):
        Image.new("RGB", (20, 10)).save(path)


def are_sound(scenes: FileScenes, folder: Path) -> None:
    """Images are those of the folder, boxes inside of them, and masks of 0 and 1."""
    for index in range(len(scenes)):
        assert scenes.path(index).resolve().is_relative_to(folder.resolve())
        assert scenes.describe(index).isprintable()
        try:
            image, (boxes, labels, masks) = scenes.load(index)
        except UserError:
            continue
        limits = torch.tensor([image.width, image.height] * 2)
        assert ((boxes >= 0) & (boxes <= limits)).all()
        assert (boxes[:, :2] < boxes[:, 2:]).all()
        assert ((labels >= 0) & (labels < len(scenes.classes))).all()
        if masks is not None:
            assert masks.shape == (len(boxes), image.height, image.width)
            assert masks.max() <= 1 if len(masks) else True


def can_be_scored(scenes: FileScenes) -> None:
    """pycocotools takes the ground truth."""
    from pycocotools.coco import COCO as Truth  # noqa: N811

    truth = Truth()
    truth.dataset = scenes.ground_truth()
    with redirect_stdout(io.StringIO()):
        truth.createIndex()
    if scenes.has_masks:
        for annotation in truth.dataset["annotations"]:
            truth.annToRLE(annotation)


def test_coco(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    write_images(tmp_path / "val")
    file = tmp_path / "annotations" / "instances_val.json"
    file.parent.mkdir()

    @settings(**SETTINGS)
    @given(content=annotations(), damage=st.none() | st.integers(0, 2000))
    @recorded("coco")
    def every(content: Any, damage: int | None) -> bool:
        text = json.dumps(content)
        file.write_text(text if damage is None else text[:damage])
        try:
            scenes = open_scenes("coco", str(tmp_path), "val")
        except UserError as error:
            is_one_sentence(error)
            return True
        assert isinstance(scenes, FileScenes)
        are_sound(scenes, tmp_path / "val")
        can_be_scored(scenes)
        return False

    assert exit_code(every) == 0


VALUES = st.sampled_from(
    ["1", "20", "0", "-1", "1e9", "nan", "inf", "-inf", "²", "", "9" * 500, "cat", "&amp;", *NAMES]
).map(lambda value: value.replace("\0", "").replace("\x1b", ""))


def test_voc(tmp_path: Path) -> None:
    write_images(tmp_path / "JPEGImages")
    for folder in ("Annotations", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
    tags = ("filename", "width", "height", "name", "difficult", "xmin", "ymin", "xmax", "ymax")
    good = dict(zip(tags, ("7.jpg", "20", "10", "cat", "0", "2", "2", "6", "6")))

    @settings(**SETTINGS)
    @given(
        changes=st.dictionaries(st.sampled_from(tags), VALUES, max_size=3),
        name=st.sampled_from(["7", "7", "9", "../7", "/7", "8"]),
        damage=st.none() | st.integers(0, 400),
    )
    @recorded("voc")
    def every(changes: dict[str, str], name: str, damage: int | None) -> bool:
        said = {tag: f"<{tag}>{value}</{tag}>" for tag, value in (good | changes).items()}
        box = "".join(said[tag] for tag in tags[5:])
        text = (
            f"<annotation>{said['filename']}<size>{said['width']}{said['height']}</size>"
            f"<object>{said['name']}{said['difficult']}<bndbox>{box}</bndbox></object></annotation>"
        )
        for place in ("7", "9"):
            (tmp_path / f"Annotations/{place}.xml").write_text(text[:damage])
        (tmp_path / "ImageSets/Main/val.txt").write_text(f"{name}\n")
        try:
            scenes = open_scenes("voc", str(tmp_path), "val")
        except UserError as error:
            is_one_sentence(error)
            return True
        assert isinstance(scenes, FileScenes)
        are_sound(scenes, tmp_path / "JPEGImages")
        scenes.ground_truth()
        return False

    assert exit_code(every) == 0


def test_label_folders(tmp_path: Path) -> None:
    for folder in ("images/val", "labels/val"):
        (tmp_path / folder).mkdir(parents=True)
    size = st.tuples(st.integers(1, 6), st.integers(1, 6)) | st.just((4, 3))
    folders = st.sampled_from(["images/{split}", "labels/{split}", "../{split}", "/{split}", ""])

    @settings(**SETTINGS)
    @given(
        sizes=st.tuples(size, size) | size.map(lambda one: (one, one)),
        mode=st.sampled_from(["L", "P", "RGB", "1", "I;16"]),
        values=st.sampled_from([(0, 1), (0, 255), (0, 3)]),
        turn=st.integers(1, 8),
        damage=st.none() | st.integers(0, 60),
        folder=st.just("images/{split}") | folders,
    )
    @recorded("label folders")
    def every(
        sizes: Any, mode: str, values: Any, turn: int, damage: int | None, folder: str
    ) -> bool:
        exif = Image.Exif()
        exif[0x0112] = turn
        Image.new("RGB", sizes[0]).save(tmp_path / "images/val/0.png", exif=exif)
        numbers = np.resize(np.array(values, np.uint8), sizes[1][::-1])
        stream = io.BytesIO()
        wide = mode == "I;16"
        label = Image.fromarray(numbers.astype(np.uint16) if wide else numbers)
        (label if wide else label.convert(mode)).save(stream, "PNG")
        (tmp_path / "labels/val/0.png").write_bytes(stream.getvalue()[:damage])
        try:
            options = {"classes": ["sky", "road"], "image_folder": folder}
            maps = open_label_maps("folders", str(tmp_path), "val", **options)
            image, labels = maps.load(0)
        except UserError as error:
            is_one_sentence(error)
            return True
        assert labels.shape == (image.height, image.width)
        assert set(labels.flatten().tolist()) <= {0, 1, 255}
        return False

    assert exit_code(every) == 0


def test_listops(tmp_path: Path) -> None:
    words = st.sampled_from([*WORDS, "(", ")", "x", "10", "\t", "\x00", "\ud800"])

    @settings(**SETTINGS)
    @given(lines=st.lists(st.lists(words, max_size=8).map(" ".join), min_size=1, max_size=4),
           value=st.sampled_from(["\t4", "\t", "", "\t44", "\t4\t4"]))  # fmt: skip
    @recorded("listops")
    def every(lines: list[str], value: str) -> bool:
        text = "\n".join([HEADER, *(line + value for line in lines)])
        (tmp_path / "basic_train.tsv").write_bytes(text.encode(errors="surrogatepass"))
        try:
            source = open_sequences("listops", str(tmp_path), "train")
        except UserError as error:
            is_one_sentence(error)
            return True
        for index in range(len(source)):
            try:
                tokens, label = source.load(index)
            except ValueError:  # UTF-8 among them
                continue
            assert isinstance(tokens, torch.Tensor)
            assert len(tokens)
            assert ((tokens >= 1) & (tokens <= len(WORDS))).all()
            assert 0 <= label < 10
        return False

    assert exit_code(every) == 0
