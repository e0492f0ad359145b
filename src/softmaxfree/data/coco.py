"""Images with boxes and masks in the format of COCO: one file of JSON for each split."""

import io
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CocoDetection

from ..errors import UserError
from .scenes import FileScenes, Record, listed, mask_tools

_KEYS = {
    "images": ("file_name", "height", "width"),
    "annotations": ("category_id",),
    "categories": ("name",),
}
"""What records take, besides what pycocotools asks for itself."""


class CocoScenes(FileScenes):
    """annotations/instances_SPLIT.json and the images in SPLIT, such as train2017."""

    def __init__(
        self, root: str, split: str, classes: list[str] | None = None, masks: bool = True
    ) -> None:
        self.file = _find_file(Path(root), split)
        self.dataset = _read(self.file, Path(root) / split)
        coco = self.dataset.coco
        annotations = coco.dataset["annotations"]
        has_masks = masks and any(annotation.get("segmentation") for annotation in annotations)
        images = [coco.imgs[number] for number in self.dataset.ids]
        names = {number: str(coco.cats[number]["name"]) for number in sorted(coco.cats)}
        ids = list(names) if classes is None else self._ids_of(classes, names)
        super().__init__(images, [names[number] for number in ids], ids, has_masks)
        places = {number: index for index, number in enumerate(self.image_ids)}
        for annotation in annotations:
            self._take(annotation, places.get(annotation["image_id"]))

    def describe(self, index: int) -> str:
        return str(Path(self.dataset.root) / self.images[index]["file_name"])

    def find_fault(self, annotation: Record, image: Record) -> str:
        fault = super().find_fault(annotation, image)
        if fault or not self.has_masks:
            return fault
        return _find_mask_fault(annotation.get("segmentation"), image["height"], image["width"])

    def read_masks(self, annotations: list[Record], image: Record) -> Tensor:
        height, width = image["height"], image["width"]
        if not annotations:
            return torch.zeros(0, height, width, dtype=torch.uint8)
        encoded = [_encode(annotation["segmentation"], height, width) for annotation in annotations]
        with warnings.catch_warnings():  # pycocotools makes numpy 2 warn
            warnings.simplefilter("ignore", DeprecationWarning)
            decoded = mask_tools().decode(encoded)  # (H, W, N)
        return torch.from_numpy(np.ascontiguousarray(decoded.transpose(2, 0, 1)))

    def _ids_of(self, classes: list[str], names: dict[int, str]) -> list[int]:
        ids = {name: number for number, name in names.items()}
        if missing := [name for name in classes if name not in ids]:
            raise UserError(
                f"{self.file} has no category {missing[0]!r}: it has {listed(names.values())}"
            )
        return [ids[name] for name in classes]

    def _take(self, annotation: Record, index: int | None) -> None:
        image = (
            f"image {annotation['image_id']}" if index is None else self.images[index]["file_name"]
        )
        described = f"annotation {annotation['id']} of {image}"
        if annotation["category_id"] not in self.labels:
            raise UserError(
                f"{described} is of the category {annotation['category_id']}, but the categories "
                f"are {listed(f'{n} {name}' for n, name in zip(self.category_ids, self.classes))}"
            )
        if index is None:
            self.skipped[described] = f"{self.file.name} has no such image"
        else:
            self.add(index, annotation, described)


def _find_file(root: Path, split: str) -> Path:
    file = root / "annotations" / f"instances_{split}.json"
    if not file.is_file():
        found = sorted(p.stem.removeprefix("instances_") for p in file.parent.glob("instances_*"))
        raise UserError(f"there is no {file}: the splits there are {listed(found) or 'none'}")
    if not (root / split).is_dir():
        raise UserError(f"there is no folder {root / split} with the images of {file.name}")
    return file


def _read(file: Path, folder: Path) -> CocoDetection:
    mask_tools()  # says how to install it where it is not
    try:
        with redirect_stdout(io.StringIO()):
            dataset = CocoDetection(folder, str(file))
        for part, keys in _KEYS.items():
            for record in dataset.coco.dataset[part]:
                if missing := [key for key in keys if key not in record]:
                    raise KeyError(missing[0])
    except KeyError as error:
        raise UserError(f"{file} is not in COCO's format: there is no {error} in it") from error
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"{file} is not in COCO's format: {error}") from error
    for part in ("images", "categories"):
        if not dataset.coco.dataset[part]:
            raise UserError(f"{file} has no {part}")
    return dataset


def _find_mask_fault(mask: Any, height: int, width: int) -> str:
    if not mask:
        return "it has no mask"
    counts = mask.get("counts") if isinstance(mask, dict) else None
    if isinstance(counts, list | str):
        if mask.get("size") != [height, width]:
            return f"its mask has the size {mask.get('size')}, its image {[height, width]}"
        runs = counts if isinstance(counts, list) else _runs(counts)
        bad = min(runs, default=-1) < 0 or sum(runs) != height * width
        return "its mask does not count the pixels of the image" if bad else ""
    if not isinstance(mask, list) or not all(isinstance(polygon, list) for polygon in mask):
        return "its mask is neither polygons nor RLE"
    bad = any(len(polygon) < 6 or len(polygon) % 2 for polygon in mask)
    return "a polygon of its mask is not three or more pairs of coordinates" if bad else ""


def _runs(counts: str) -> list[int]:
    """Lengths of the runs in a compressed RLE; none where it ends within a number.

    pycocotools does not check them, and decodes those of too few pixels to whatever is in memory.

    Numbers are in pieces of five bits, the lowest first, with a sixth that tells whether more
    follow; from the fourth on, they are differences to the one before the last.
    """
    runs: list[int] = []
    value = shift = 0
    for piece in counts.encode():
        piece -= 48
        value |= (piece & 31) << shift
        shift += 5
        if not piece & 32:
            sign = (piece & 16) << shift - 4
            runs.append(value - sign + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return [] if shift else runs


def _encode(mask: Any, height: int, width: int) -> Any:
    """As RLE, compressed."""
    if isinstance(mask, list):
        return mask_tools().merge(mask_tools().frPyObjects(mask, height, width))
    if isinstance(mask["counts"], list):
        return mask_tools().frPyObjects(mask, height, width)
    return mask
