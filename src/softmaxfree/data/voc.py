"""Images with boxes in PASCAL VOC's format: one XML file for each image."""

import os
import re
from pathlib import Path
from xml.etree import ElementTree

from ..errors import UserError
from .paths import below, read_file, shown
from .scenes import FileScenes, Record, clipped_box, is_number, listed

_SPLITS = Path("ImageSets") / "Main"
_SIDES = ("xmin", "ymin", "xmax", "ymax")
_MOST_BYTES = 100 * 2**20
"""Largest XML file."""


class VocScenes(FileScenes):
    """Reads Annotations, JPEGImages and ImageSets/Main/SPLIT.txt, up to two folders below root."""

    def __init__(self, root: str, split: str, classes: list[str] | None = None) -> None:
        self.folder = _find_folder(Path(root))
        names = _read_split(self.folder, split)
        trees = {name: _parse(below(self.folder / "Annotations", f"{name}.xml")) for name in names}
        if classes is None:
            classes = sorted(self._names_in_all_files(trees))
        files = {path.name for path in (self.folder / "JPEGImages").iterdir()}
        images = [
            _image(number, name, tree, files)
            for number, (name, tree) in enumerate(trees.items(), start=1)
        ]
        super().__init__(images, classes, list(range(1, len(classes) + 1)), masks=False)
        for index, (name, tree) in enumerate(trees.items()):
            for place, element in enumerate(tree.findall("object"), start=1):
                described = f"object {place} of {shown(name)}.xml"
                self.add(index, self._annotation(index, element, described), described)

    def path(self, index: int) -> Path:
        return self.folder / "JPEGImages" / self.images[index]["file_name"]

    def _names_in_all_files(self, trees: dict[str, ElementTree.Element]) -> set[str]:
        """Names of the classes in all splits, so that every split has the same."""
        others = (
            _parse(path)
            for path in (self.folder / "Annotations").glob("*.xml")
            if path.stem not in trees
        )
        return {
            _text(element, "name")
            for group in (trees.values(), others)
            for tree in group
            for element in tree.findall("object")
        } - {""}

    def _annotation(self, index: int, element: ElementTree.Element, described: str) -> Record:
        name = _text(element, "name")
        if name not in self.classes:
            raise UserError(
                f"{described} is of the class {name!r}, but the classes are {listed(self.classes)}"
            )
        record: Record = {
            "image_id": self.image_ids[index],
            "category_id": self.category_ids[self.classes.index(name)],
            "iscrowd": int(_text(element, "difficult") == "1"),
        }
        try:
            x1, y1, x2, y2 = (float(_text(element, f"bndbox/{side}")) for side in _SIDES)
        except ValueError:
            return record  # without a box, which is reported
        if not all(map(is_number, (x1, y1, x2, y2))):
            return record
        # VOC counts pixels from 1 and includes the last one.
        x1, y1, x2, y2 = clipped_box([x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1], self.images[index])
        return {**record, "bbox": [x1, y1, x2 - x1, y2 - y1]}


def _find_folder(root: Path) -> Path:
    for pattern in ("Annotations", "*/Annotations", "*/*/Annotations"):
        parents = sorted(path.parent for path in root.glob(pattern))
        found = [p for p in parents if (p / _SPLITS).is_dir() and (p / "JPEGImages").is_dir()]
        if len(found) > 1:
            raise UserError(f"{root} holds several data sets: give one of {listed(found)}")
        if found:
            return found[0]
    raise UserError(
        f"{root} is not in the format of PASCAL VOC: "
        "it takes the folders Annotations, JPEGImages and ImageSets/Main"
    )


def _read_split(folder: Path, split: str) -> list[str]:
    path = below(folder / _SPLITS, f"{split}.txt")
    if not path.is_file():
        found = sorted(other.stem for other in path.parent.glob("*.txt"))
        raise UserError(f"{folder} has no split {split!r}: it has {listed(found) or 'none'}")
    lines = os.fsdecode(read_file(path)).splitlines()  # as file names are decoded
    names = [line.split()[0] for line in lines if line.strip()]
    if not names:
        raise UserError(f"{path} has no images: it takes the name of one in each line")
    return names


def _parse(path: Path) -> ElementTree.Element:
    if not path.exists():
        raise UserError(f"there is no {shown(path)}: each image of a split takes its XML")
    text = read_file(path, _MOST_BYTES)
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # unknown encodings
        raise UserError(f"{shown(path)} cannot be read as XML: {error}") from error


def _image(number: int, name: str, tree: ElementTree.Element, files: set[str]) -> Record:
    width, height = _text(tree, "size/width"), _text(tree, "size/height")
    if not all(re.fullmatch("0*[1-9][0-9]{0,5}", side) for side in (width, height)):
        raise UserError(f"{shown(name)}.xml does not give the size of its image in pixels")
    candidates = (_text(tree, "filename"), f"{name}.jpg", f"{name}.png")
    file = next((candidate for candidate in candidates if candidate in files), f"{name}.jpg")
    return {"id": number, "file_name": file, "height": int(height), "width": int(width)}


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
