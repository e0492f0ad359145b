"""Images with boxes and masks in COCO's format: one JSON file for each split."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from .image_files import OWN
from .paths import below, read_file, shown
from .scenes import FileScenes, Record, is_number, listed, mask_tools

_FARTHEST = 100_000
"""Largest coordinate of a polygon, in pixels: pycocotools kills the process if the points between
two corners exceed memory."""

_LONGEST = 2_000_000
"""Largest perimeter of all polygons of a mask, in pixels."""

_LONGEST_OF_IMAGE = 5 * _LONGEST
"""The same of all masks of an image, which then take a second at most."""

_MOST_BYTES = 2 * 10**9
"""Largest memory of all masks of an image, one byte for each pixel."""

_SIDE = 1_000_000
"""Largest side of an image, in pixels."""

_Check = tuple[str, Callable[[Any], bool]]
_NUMBER: _Check = "a whole number", lambda value: type(value) is int and abs(value) < 2**63
_NAMED: _Check = "a number or text", lambda value: type(value) is str or _NUMBER[1](value)
_TEXT: _Check = "text", lambda value: type(value) is str
_PIXELS: _Check = (
    f"a whole number from 1 to {_SIDE}",
    lambda value: is_number(value) and int(value) == value and 1 <= value <= _SIDE,
)
_KEYS = {
    "images": {"id": _NAMED, "file_name": _TEXT, "height": _PIXELS, "width": _PIXELS},
    "annotations": {"id": _NAMED, "image_id": _NAMED, "category_id": _NUMBER},
    "categories": {"id": _NUMBER, "name": _NAMED},
}
"""Required keys of the records in each part."""


class CocoScenes(FileScenes):
    """Reads annotations/instances_SPLIT.json and the images in SPLIT, such as train2017."""

    def __init__(
        self, root: str, split: str, classes: list[str] | None = None, masks: bool = True
    ) -> None:
        self.file = _find_file(Path(root), split)
        self.folder = Path(root) / split
        content = _read(self.file)
        annotations = content["annotations"]
        has_masks = masks and any(annotation.get("segmentation") for annotation in annotations)
        images = [record for _, record in sorted(_by_id(self.file, content["images"]).items())]
        for image in images:
            below(self.folder, image["file_name"])
        categories = _by_id(self.file, content["categories"])
        names = {number: str(record["name"]) for number, record in sorted(categories.items())}
        ids = list(names) if classes is None else self._ids_of(classes, names)
        super().__init__(images, [names[number] for number in ids], ids, has_masks)
        places = {number: index for index, number in enumerate(self.image_ids)}
        for annotation in annotations:
            self._take(annotation, places.get(annotation["image_id"]))

    def path(self, index: int) -> Path:
        return self.folder / self.images[index]["file_name"]

    def find_fault(self, annotation: Record, image: Record) -> str:
        fault = super().find_fault(annotation, image)
        if fault or not self.has_masks:
            return fault
        return _find_mask_fault(annotation.get("segmentation"), image["height"], image["width"])

    def read_masks(self, annotations: list[Record], image: Record) -> Tensor:
        height, width = image["height"], image["width"]
        if not annotations:
            return torch.zeros(0, height, width, dtype=torch.uint8)
        if (size := len(annotations) * height * width) > _MOST_BYTES:
            raise UserError(f"its {len(annotations)} masks take {size / 1e9:.0f} GB in memory")
        masks = [annotation["segmentation"] for annotation in annotations]
        polygons = [polygon for mask in masks if isinstance(mask, list) for polygon in mask]
        if sum(map(_length, polygons)) > _LONGEST_OF_IMAGE:
            raise UserError("its polygons are too long")
        encoded = [_encode(mask, height, width) for mask in masks]
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
        described = f"annotation {annotation['id']} of {shown(image)}"
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
    file, folder = below(root, f"annotations/instances_{split}.json"), below(root, split)
    if not file.is_file():
        found = sorted(p.stem.removeprefix("instances_") for p in file.parent.glob("instances_*"))
        raise UserError(f"there is no {file}: the splits there are {listed(found) or 'none'}")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} with the images of {file.name}")
    return file


def _read(file: Path) -> dict[str, list[Record]]:
    """The file's images, annotations and categories; raises UserError if a record is invalid."""
    mask_tools()  # raises UserError if it is not installed
    text = read_file(file)
    try:
        content = json.loads(text)
    except RecursionError:
        raise UserError(f"{file} is not in COCO's format: it is nested too deeply") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{file} is not in COCO's format: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not in COCO's format: it is not an object of lists")
    for part, checks in _KEYS.items():
        if part not in content:
            raise UserError(f"{file} is not in COCO's format: there is no {part!r} in it")
        if not isinstance(content[part], list):
            raise UserError(f"{file} is not in COCO's format: its {part} are not a list")
        for place, record in enumerate(content[part], 1):
            if fault := _find_record_fault(record, checks):
                raise UserError(
                    f"{file} is not in COCO's format: in record {place} of its {part} {fault}"
                )
    for part in ("images", "categories"):
        if not content[part]:
            raise UserError(f"{file} has no {part}")
    for image in content["images"]:
        image.update({side: int(image[side]) for side in ("height", "width")})
    return content


def _find_record_fault(record: Any, checks: dict[str, _Check]) -> str:
    if not isinstance(record, dict):
        return "there is no object"
    for key, (expected, fits) in checks.items():
        if key not in record:
            return f"there is no {key!r}"
        if not fits(record[key]):
            return f"{key!r} is {repr(record[key])[:60]}, and {expected} is expected"
    return ""


def _by_id(file: Path, records: list[Record]) -> dict[Any, Record]:
    if len({type(record["id"]) for record in records}) > 1:
        raise UserError(f"{file} has ids that are numbers and ids that are text: take one of them")
    return {record["id"]: record for record in records}


def _find_mask_fault(mask: Any, height: int, width: int) -> str:
    if not mask:
        return "it has no mask"
    if height * width > OWN.pixels:
        return "its image has too many pixels to be read"
    if isinstance(mask, dict):
        return _find_rle_fault(mask, height, width)
    if not isinstance(mask, list) or not all(isinstance(polygon, list) for polygon in mask):
        return "its mask is neither polygons nor RLE"
    if any(len(polygon) < 6 or len(polygon) % 2 for polygon in mask):
        return "a polygon of its mask is not three or more pairs of coordinates"
    lengths = [_perimeter(polygon) for polygon in mask]
    if None in lengths:
        return f"a polygon of its mask has a coordinate that is not a number within {_FARTHEST}"
    return "its polygons are too long" if sum(filter(None, lengths)) > _LONGEST else ""


def _find_rle_fault(mask: Record, height: int, width: int) -> str:
    counts, size = mask.get("counts"), mask.get("size")
    if not isinstance(counts, list | str):
        return "its mask is neither polygons nor RLE"
    if size != [height, width] or [type(side) for side in size] != [int, int]:
        return f"its mask has the size {repr(size)[:60]}, its image {[height, width]}"
    runs = counts if isinstance(counts, list) else _runs(counts)
    bad = {type(run) for run in runs} != {int} or min(runs) < 0 or sum(runs) != height * width
    return "its mask does not count the pixels of the image" if bad else ""


def _perimeter(polygon: list[Any]) -> float | None:
    """An upper bound of a polygon's perimeter in pixels; None if a coordinate is invalid.

    It avoids loops over coordinates: files have millions of polygons.
    """
    try:
        low, high, total = min(polygon), max(polygon), sum(polygon)
    except (TypeError, OverflowError):  # text, lists, huge integers
        return None
    if not (low >= -_FARTHEST and high <= _FARTHEST and total == total):  # false for NaN
        return None
    if len(polygon) * (high - low) <= _LONGEST:
        return 0.0
    return _length(polygon)


def _length(polygon: list[Any]) -> float:
    corners = np.array(polygon, dtype=np.float64).reshape(-1, 2)
    return float(np.abs(corners - np.roll(corners, 1, axis=0)).max(1).sum())


def _runs(counts: str) -> list[int]:
    """Run lengths of a compressed RLE; empty if it is invalid.

    pycocotools does not check them: it fills missing pixels with uninitialised memory.

    A number is stored in pieces of five bits, lowest first; a sixth bit says whether more follow.
    From the fourth number on, they are differences to the number two before.
    """
    runs: list[int] = []
    value = shift = 0
    for letter in counts:
        piece = ord(letter) - 48
        if not 0 <= piece < 64 or shift > 30:  # more than 35 bits, or not RLE
            return []
        value |= (piece & 31) << shift
        shift += 5
        if not piece & 32:
            sign = (piece & 16) << shift - 4
            runs.append(value - sign + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return [] if shift else runs


def _encode(mask: Any, height: int, width: int) -> Any:
    """A mask as compressed RLE."""
    if isinstance(mask, list):
        return mask_tools().merge(mask_tools().frPyObjects(mask, height, width))
    if isinstance(mask["counts"], list):
        return mask_tools().frPyObjects(mask, height, width)
    return mask
