"""Images with a class for every pixel."""

import colorsys
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import Cityscapes

from ..errors import UserError
from . import ade20k_classes
from .digit_scenes import DigitScenes
from .image_files import ImageFileError, header_size, load_image, load_numbers, sizes
from .paths import below, shown
from .roots import find_root
from .scenes import listed
from .sources import Source

IGNORE = 255
"""Class of ignored pixels."""

Colour = tuple[int, int, int]

_ALL, _SOME = 1000, 200
"""Opening a data set checks the values of all labels if there are at most _ALL, else of _SOME."""

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".ppm")
_SYNONYMS = (("train", "training"), ("val", "valid", "validation"))


class LabelMaps(Source):
    """Images with a class for every pixel, by number."""

    classes: list[str]
    palette: list[Colour]
    """A colour for each class."""

    @abstractmethod
    def load(self, index: int) -> tuple[Image.Image, Tensor]:
        """An RGB image and its classes (H, W) of uint8: 0 to K - 1, and IGNORE."""


class DigitMaps(LabelMaps):
    """Scenes of digits: 0 is the background, 1 to 10 are the digits."""

    def __init__(self, split: str) -> None:
        self.scenes = DigitScenes(split)
        self.classes = ["background", *self.scenes.classes]
        self.palette = [(0, 0, 0), *generated_palette(10)]

    def __len__(self) -> int:
        return len(self.scenes)

    def load(self, index: int) -> tuple[Image.Image, Tensor]:
        image, (_, labels, masks) = self.scenes.load(index)
        assert masks is not None
        # Masks do not overlap: a digit in front hides those behind.
        return image, (masks * (labels + 1).to(torch.uint8)[:, None, None]).amax(0)

    def describe(self, index: int) -> str:
        return self.scenes.describe(index)


class FileMaps(LabelMaps):
    """Pairs of an image and a single-channel PNG of the same size.

    An unreadable file is not an error at the start; it is reported when it is loaded.

    Args:
        values: The class, or IGNORE, of each value in labels.
    """

    def __init__(
        self,
        pairs: list[tuple[Path, Path]],
        classes: list[str],
        palette: list[Colour],
        values: dict[int, int],
    ) -> None:
        self.pairs, self.classes, self.palette, self.values = pairs, classes, palette, values
        self.table = np.full(256, IGNORE, dtype=np.uint8)
        self.table[list(values)] = list(values.values())
        for image, label in pairs:
            with suppress(ImageFileError):
                _check_sizes(image, label)
        count = len(pairs)
        checked = range(count) if count <= _ALL else [n * count // _SOME for n in range(_SOME)]
        for index in checked:
            with suppress(ImageFileError):
                self._read_label(index)

    def __len__(self) -> int:
        return len(self.pairs)

    def load(self, index: int) -> tuple[Image.Image, Tensor]:
        label = self._read_label(index)
        image = load_image(self.pairs[index][0], annotated=label.size)
        if image.size != label.size:
            raise UserError(
                f"it has {image.width} x {image.height} pixels, but its label has "
                f"{label.width} x {label.height}"
            )
        return image, torch.from_numpy(self.table[np.asarray(label)])

    def describe(self, index: int) -> str:
        return shown(self.pairs[index][0])

    def _read_label(self, index: int) -> Image.Image:
        """A label map; raises UserError for unknown values."""
        path = self.pairs[index][1]
        try:
            file = load_numbers(path)
        except ImageFileError as error:
            raise ImageFileError(f"its label {shown(path)} cannot be read: {error}") from error
        if file.mode not in ("L", "P"):
            raise UserError(
                f"the label {path} is of Pillow's mode {file.mode}: "
                "save it with one channel of 8 bits, L or P"
            )
        found = (value for value, count in enumerate(file.histogram()) if count)
        if unknown := [value for value in found if value not in self.values]:
            raise UserError(
                f"the label {path} has the value {unknown[0]}, but with {len(self.classes)} "
                f"classes values may be {_ranges(self.values)}: correct the label, or what is "
                "given as classes and as values to ignore"
            )
        return file


def open_label_maps(name: str, root: str | None, split: str, **options: Any) -> LabelMaps:
    """Opens a data set of images with a class for every pixel.

    Args:
        name: "digit_scenes", "ade20k" or "cityscapes" in their official layouts, or "folders".
        root: Its folder, as given or below $SOFTMAXFREE_DATA.
        split: The part; "" if there are no folders of splits.
        options: Options of `open_folders`, for "folders".
    """
    openers: dict[str, Callable[[], LabelMaps]] = {
        "digit_scenes": lambda: DigitMaps(split),
        "ade20k": lambda: _open_ade20k(Path(find_root(root)), split),
        "cityscapes": lambda: _open_cityscapes(Path(find_root(root)), split),
        "folders": lambda: open_folders(Path(find_root(root)), split, **options),
    }
    if name not in openers:
        raise UserError(
            f"there is no data set of label maps {name!r}: take one of {listed(openers)}"
        )
    if options and name != "folders":
        raise UserError(f"{name} takes no {listed(options)}: only the data set folders does")
    return openers[name]()


def open_folders(
    root: Path,
    split: str,
    image_folder: str = "images/{split}",
    label_folder: str = "labels/{split}",
    label_suffix: str = "",
    classes: Sequence[str] = (),
    ignore: Sequence[int] = (IGNORE,),
    palette: Sequence[Sequence[int]] | None = None,
) -> LabelMaps:
    """Opens a folder of images and a folder of labels.

    Args:
        root: The folder that contains both.
        split: Replaces {split} in their names.
        image_folder: Images, below root.
        label_folder: Labels, below root: PNGs with the names of the images.
        label_suffix: Suffix of the labels' names, such as "_L".
        classes: Names of the values 0, 1, ... of labels, without ignored values.
        ignore: Values of ignored pixels.
        palette: A colour (red, green, blue) for each class; generated if not given.
    """
    if not 1 <= len(classes) <= IGNORE:
        raise UserError(
            f"{len(classes)} classes are given, but it takes 1 to {IGNORE}: "
            "give the names of all values of the labels with --data.classes"
        )
    if twice := [name for name, count in Counter(classes).items() if count > 1]:
        raise UserError(f"{twice[0]!r} is the name of several classes: give each its own")
    if wrong := [value for value in ignore if not 0 <= value <= 255]:
        raise UserError(f"labels never have the value {wrong[0]} to ignore: give 0 to 255")
    if palette is None:
        palette = generated_palette(len(classes))
    colours = [(red, green, blue) for red, green, blue in palette]
    if len(colours) != len(classes):
        raise UserError(
            f"{len(colours)} colours are given for {len(classes)} classes: give one for each"
        )
    folders = _find_folders(root, split, image_folder, label_folder)
    pairs = _pair(folders, _IMAGES, f"{label_suffix}.png")
    return FileMaps(pairs, list(classes), colours, _in_order(len(classes), ignore))


def generated_palette(count: int) -> list[Colour]:
    """Distinct colours: hue, saturation and brightness advance by golden-ratio steps."""
    golden = 1.2207440846  # the golden ratio in three dimensions, the root of x**4 = x + 1
    colours = []
    for number in range(count):
        hue, saturation, brightness = (number / golden**power % 1 for power in (1, 2, 3))
        rgb = colorsys.hsv_to_rgb(hue, 0.35 + 0.65 * saturation, 0.5 + 0.5 * brightness)
        red, green, blue = (round(255 * part) for part in rgb)
        colours.append((red, green, blue))
    return colours


def _open_ade20k(root: Path, split: str) -> LabelMaps:
    """Opens images/SPLIT/*.jpg and annotations/SPLIT/*.png, whose value 0 is ignored."""
    folders = _find_folders(root, split, "images/{split}", "annotations/{split}")
    classes, palette = list(ade20k_classes.CLASSES), list(ade20k_classes.PALETTE)
    return FileMaps(_pair(folders, [".jpg"], ".png"), classes, palette, _in_order(150, [0]))


def _open_cityscapes(root: Path, split: str) -> LabelMaps:
    """Opens leftImg8bit/SPLIT/CITY and gtFine/SPLIT/CITY, with train ids if there are any."""
    folders = _find_folders(root, split, "leftImg8bit/{split}", "gtFine/{split}")
    known = [c for c in Cityscapes.classes if 0 <= c.train_id < IGNORE]
    end, values = "_gtFine_labelTrainIds.png", _in_order(len(known), [IGNORE])
    if not any(folders[1].glob(f"*/*{end}")):
        end = "_gtFine_labelIds.png"
        values = {c.id: c.train_id for c in Cityscapes.classes if c.id >= 0}
    pairs = _pair(folders, ["_leftImg8bit.png"], end, "*/*")
    return FileMaps(pairs, [c.name for c in known], [c.color for c in known], values)


def _in_order(count: int, ignore: Sequence[int]) -> dict[int, int]:
    """Maps values to classes in order; ignored values have none."""
    counted = [value for value in range(256) if value not in ignore][:count]
    return {**dict.fromkeys(ignore, IGNORE), **{value: n for n, value in enumerate(counted)}}


def _find_folders(root: Path, split: str, *templates: str) -> list[Path]:
    """The folders of a split, or of a synonym of it."""
    if split and not all("{split}" in template for template in templates):
        raise UserError(
            f"the folders {listed(templates)} are those of all splits, not of {split!r} alone: "
            "write {split} in place of its name, or give an empty split"
        )
    synonyms = next((group for group in _SYNONYMS if split in group), ())
    for name in (split, *synonyms):
        folders = [below(root, template.replace("{split}", name)) for template in templates]
        if all(folder.is_dir() for folder in folders):
            return folders
    missing = [template.replace("{split}", split) for template in templates]
    raise UserError(
        f"{root} has no split {split!r}, which takes the folders {listed(missing)}: "
        f"the splits there are {listed(_find_splits(root, *templates)) or 'none'}"
    )


def _find_splits(root: Path, *templates: str) -> list[str]:
    """Names of splits for which all folders exist."""
    start, _, end = (re.escape(part) for part in templates[0].partition("{split}"))
    pattern = f"{start}([^/]+){end}".replace(re.escape("{split}"), r"\1")
    paths = (path.relative_to(root) for path in root.glob(templates[0].replace("{split}", "*")))
    names = (re.fullmatch(pattern, path.as_posix()) for path in paths)
    return sorted(
        name[1]
        for name in names
        if name and all((root / other.replace("{split}", name[1])).is_dir() for other in templates)
    )


def _pair(
    folders: Sequence[Path], image_ends: Sequence[str], label_end: str, pattern: str = "*"
) -> list[tuple[Path, Path]]:
    """Pairs of images and labels whose names agree up to the suffix."""
    images = _files(folders[0], image_ends, pattern)
    labels = _files(folders[1], [label_end], pattern)
    if not images and not labels:
        inside = sorted(path.name for path in folders[0].iterdir() if path.is_dir())
        raise UserError(
            f"{folders[0]} has no images whose names end in {listed(image_ends)}: "
            f"the folders in it are {listed(inside[:6]) or 'none'}"
        )
    for kind, mine, other, others in (
        ("image", images, f"label that ends in {label_end}", labels),
        ("label", labels, "image", images),
    ):
        if alone := [str(path) for name, path in mine.items() if name not in others]:
            raise UserError(
                f"{len(alone)} of {len(mine)} {kind}s have no {other} in "
                f"{folders[kind == 'image']}: {listed(alone[:3])}{' ...' if alone[3:] else ''}; "
                "each takes a partner of the same name"
            )
    return [(image, labels[name]) for name, image in images.items()]


def _files(folder: Path, ends: Sequence[str], pattern: str) -> dict[str, Path]:
    """Files in a folder by name, without the suffix."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(pattern)):
        name = path.relative_to(folder).as_posix()
        end = next((end for end in ends if name.lower().endswith(end.lower())), "")
        if not end or path.name.startswith("."):
            continue
        name = name[: -len(end)]
        if name in found:
            raise UserError(f"{found[name]} and {path} have the same name: rename one of them")
        found[name] = path
    return found


def _check_sizes(image: Path, label: Path) -> None:
    """Raises UserError if the sizes differ; reads only headers, except of PNGs that seem to."""
    mine, other = header_size(image), header_size(label)
    if mine != other and other not in sizes(image):
        raise UserError(
            f"the image {shown(image)} has {mine[0]} x {mine[1]} pixels, but its label "
            f"{shown(label)} has {other[0]} x {other[1]}: each pixel takes a class"
        )


def _ranges(values: Iterable[int]) -> str:
    """0 to 18 and 255, for example."""
    runs = groupby(enumerate(sorted(values)), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return " and ".join(str(a) if a == b else f"{a} to {b}" for a, b in ends)
