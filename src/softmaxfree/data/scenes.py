"""Images with objects: boxes, classes and masks, and the ground truth for scoring."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ..errors import UserError
from ..imports import needs
from .image_files import load_image
from .paths import shown
from .roots import find_root
from .sources import Source

Record = dict[str, Any]
"""An image or an annotation in COCO's JSON format."""


class Objects(NamedTuple):
    boxes: Tensor
    """(N, 4), x1 y1 x2 y2 in pixels."""
    labels: Tensor
    """(N), indices into the list of classes."""
    masks: Tensor | None
    """(N, H, W) of 0 and 1, if the data set has masks."""


class Scenes(Source):
    """Images with objects, by number."""

    classes: list[str]
    category_ids: list[int]
    """Ids of the classes in the ground truth."""
    image_ids: list[int]
    """Ids of the images in the ground truth, by number."""
    has_masks: bool
    skipped: dict[str, str]
    """Invalid annotations, which are left out, with reasons."""

    def __len__(self) -> int:
        return len(self.image_ids)

    @abstractmethod
    def load(self, index: int) -> tuple[Image.Image, Objects]:
        """An RGB image and its objects, without crowds, which matter only for scoring."""

    @abstractmethod
    def is_empty(self, index: int) -> bool:
        """Whether an image has no object to train on; does not open the image."""

    @abstractmethod
    def annotated(self, index: int) -> tuple[Record, list[Record]]:
        """An image and its annotations, including crowds, in COCO's JSON format."""

    def ground_truth(self) -> dict[str, list[Record]]:
        """All images, annotations and categories, for pycocotools."""
        images, annotations = zip(*(self.annotated(index) for index in range(len(self))))
        flat = [annotation for group in annotations for annotation in group]
        return {
            "images": list(images),
            # Numbered from 1: pycocotools treats annotation 0 as missing.
            "annotations": [{**annotation, "id": n} for n, annotation in enumerate(flat, 1)],
            "categories": [
                {"id": number, "name": name}
                for number, name in zip(self.category_ids, self.classes)
            ],
        }


class FileScenes(Scenes):
    """Scenes in image files; annotations are checked when the data set is opened."""

    def __init__(
        self, images: list[Record], classes: list[str], category_ids: list[int], masks: bool
    ) -> None:
        self.images, self.classes, self.category_ids = images, classes, category_ids
        self.image_ids = [image["id"] for image in images]
        self.annotations: list[list[Record]] = [[] for _ in images]
        self.has_masks, self.skipped = masks, {}
        self.labels = {number: label for label, number in enumerate(category_ids)}

    @abstractmethod
    def path(self, index: int) -> Path:
        """The file of an image."""

    def describe(self, index: int) -> str:
        return shown(self.path(index))

    def add(self, index: int, annotation: Record, described: str) -> None:
        """Adds an annotation of an image, or records why it is invalid."""
        if fault := self.find_fault(annotation, self.images[index]):
            self.skipped[described] = fault
            return
        annotation.setdefault("iscrowd", 0)
        annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
        self.annotations[index].append(annotation)

    def find_fault(self, annotation: Record, image: Record) -> str:
        """Why an annotation is invalid; empty if it is valid."""
        box = annotation.get("bbox")
        if not isinstance(box, list) or [is_number(n) for n in box] != [True] * 4:
            return "its box is not four numbers"
        if not is_number(annotation.get("area", 0)):
            return "its area is not a number"
        if annotation.get("iscrowd", 0) not in (0, 1):
            return "its iscrowd is neither 0 nor 1"
        x1, y1, x2, y2 = clipped_box(box, image)
        return "" if x2 > x1 and y2 > y1 else "its box has no area in the image"

    def read_masks(self, annotations: list[Record], image: Record) -> Tensor:
        """(N, H, W); called only for data sets with masks."""
        raise AssertionError(f"{type(self).__name__} has no masks")

    def load(self, index: int) -> tuple[Image.Image, Objects]:
        record = self.images[index]
        image = load_image(self.path(index), annotated=(record["width"], record["height"]))
        if image.size != (record["width"], record["height"]):
            raise UserError(
                f"the image is {image.width} x {image.height} pixels, "
                f"but {record['width']} x {record['height']} in its annotation"
            )
        found = [a for a in self.annotations[index] if not a["iscrowd"]]
        boxes = torch.tensor([clipped_box(a["bbox"], record) for a in found], dtype=torch.float32)
        labels = torch.tensor([self.labels[a["category_id"]] for a in found], dtype=torch.int64)
        masks = self.read_masks(found, record) if self.has_masks else None
        return image, Objects(boxes.reshape(-1, 4), labels, masks)

    def is_empty(self, index: int) -> bool:
        return all(annotation["iscrowd"] for annotation in self.annotations[index])

    def annotated(self, index: int) -> tuple[Record, list[Record]]:
        keys = ["image_id", "category_id", "bbox", "area", "iscrowd"]
        keys += ["segmentation"] if self.has_masks else []
        image = {key: self.images[index][key] for key in ("id", "file_name", "height", "width")}
        return image, [{key: a[key] for key in keys} for a in self.annotations[index]]


def is_number(value: object) -> bool:
    """Whether a value from a file is a number of reasonable size."""
    return type(value) in (int, float) and abs(value) < 1e15  # type: ignore[arg-type]


def clipped_box(box: list[float], image: Record) -> tuple[float, float, float, float]:
    """A box x, y, width, height as x1, y1, x2, y2, clipped to the image."""
    x, y, width, height = box
    return max(x, 0), max(y, 0), min(x + width, image["width"]), min(y + height, image["height"])


def open_scenes(
    name: str, root: str | None, split: str, classes: list[str] | None = None, masks: bool = True
) -> Scenes:
    """Opens a data set of images with objects.

    Args:
        name: "digit_scenes", or "coco" or "voc" for folders in their formats.
        root: Its folder, as given or below $SOFTMAXFREE_DATA.
        split: The data set's name of the part.
        classes: Classes in the order of their labels; all of the data set if not given.
        masks: Read the masks too, if there are any.
    """
    from .coco import CocoScenes  # these modules import this one
    from .digit_scenes import DigitScenes
    from .voc import VocScenes

    openers: dict[str, Callable[[], Scenes]] = {
        "digit_scenes": lambda: DigitScenes(split, masks),
        "coco": lambda: CocoScenes(find_root(root), split, classes, masks),
        "voc": lambda: VocScenes(find_root(root), split, classes),
    }
    if name not in openers:
        raise UserError(f"there is no data set of scenes {name!r}: take one of {listed(openers)}")
    scenes = openers[name]()
    if classes is not None and scenes.classes != classes:
        raise UserError(
            f"the classes given are {listed(classes)}, those of {name} are "
            f"{listed(scenes.classes)}; leave them out to take its own"
        )
    return scenes


def mask_tools() -> Any:
    """The module of pycocotools that encodes and decodes masks."""
    with needs("detection", "reading and scoring masks"):
        from pycocotools import mask  # type: ignore[import-untyped]
    return mask


def listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
