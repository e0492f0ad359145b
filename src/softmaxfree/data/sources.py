"""Labelled images by number: every format that timm reads, and the embedded digits."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import ImageDataset, IterableImageDataset, create_dataset
from timm.utils.misc import natural_key

from ..errors import UserError, user_file
from ..imports import needs
from .image_files import SUFFIXES, load_image, upright_rgb
from .paths import shown
from .roots import find_root

HELD_OUT = 5
"""Hold out a fifth of the images, where a data set has no validation split of its own."""

_TRAIN = ("train", "training")
_EVALUATION = ("val", "valid", "validation", "eval", "evaluation", "test")


class Source(ABC):
    """Labelled samples by number; loading one may raise, which the caller handles."""

    classes: list[str] | None = None
    """Names of the classes by number, if the data set has them."""
    origin: str = ""
    """Where the samples come from, for people."""
    left_out: tuple[str, ...] = ()
    """Folders of classes without images."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, index: int) -> tuple[Any, Any]:
        """An input, such as an RGB image, and its target, such as a class (-1 if it has none)."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """The file or number of a sample, for messages."""


class View(Source):
    """Samples of another source by their numbers in it; all of them if no numbers are given."""

    def __init__(self, source: Source, numbers: Sequence[int] | None = None) -> None:
        self.source, self.classes, self.origin = source, source.classes, source.origin
        self.left_out = source.left_out
        self.numbers = range(len(source)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def load(self, index: int) -> tuple[Any, Any]:
        return self.source.load(self.numbers[index])

    def describe(self, index: int) -> str:
        return self.source.describe(self.numbers[index])


class Cached(View):
    """Caches the decoded images of another source in memory."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.loaded: dict[int, tuple[Any, Any]] = {}

    def load(self, index: int) -> tuple[Any, Any]:
        if index not in self.loaded:
            self.loaded[index] = super().load(index)
        return self.loaded[index]


class Digits(Source):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; every fifth is held out."""

    def __init__(self, split: str) -> None:
        with needs("train", "the data set digits"):
            from sklearn.datasets import load_digits
        digits = load_digits()
        self.images = (digits.images * (255 / 16)).astype("uint8")
        self.targets = digits.target
        held_out = split in _EVALUATION
        # A fixed shuffle, because neighbours in the file were written by the same person
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(0))
        self.numbers = [n for i, n in enumerate(order.tolist()) if (i % HELD_OUT == 0) == held_out]
        self.classes = [str(digit) for digit in range(10)]
        self.origin = "scikit-learn's handwritten digits, " + (
            "every fifth" if held_out else "all but every fifth"
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def load(self, index: int) -> tuple[Image.Image, int]:
        number = self.numbers[index]
        return Image.fromarray(self.images[number]).convert("RGB"), int(self.targets[number])

    def describe(self, index: int) -> str:
        return f"digits[{self.numbers[index]}]"


class FolderImages(Source):
    """Images by the name of the folder that they lie in, which is their class.

    Classes and images are ordered as timm does. Its own reader skips formats, and takes hidden
    folders such as .ipynb_checkpoints for classes.
    """

    def __init__(self, root: Path) -> None:
        found, empty = [], {folder.name for folder in _folders(root)}
        for place, folders, names in os.walk(root, followlinks=True):
            folders[:] = [name for name in folders if name[0] != "."]
            below = os.path.relpath(place, root)
            images = [
                (os.path.join(place, name), os.path.basename(below).lstrip("."))
                for name in names
                if name[0] != "." and os.path.splitext(name)[1].lower() in SUFFIXES
            ]
            if images:
                empty.discard(below.split(os.sep)[0])
            found += images
        self.classes = sorted(sorted({name for _, name in found}), key=natural_key)
        numbers = {name: number for number, name in enumerate(self.classes)}
        found = sorted(sorted(found), key=lambda image: natural_key(image[0]))
        self.samples = [(path, numbers[name]) for path, name in found]
        self.left_out = tuple(f"{shown(root / name)}/" for name in sorted(empty))

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, index: int) -> tuple[Image.Image, int]:
        path, target = self.samples[index]
        return load_image(Path(path)), target

    def describe(self, index: int) -> str:
        return shown(self.samples[index][0])


class TimmImages(Source):
    """A data set that timm reads by number: a tar file, Hugging Face tables."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset, self.reader = dataset, dataset.reader
        names = getattr(self.reader, "class_to_idx", None)
        self.classes = sorted(names, key=names.__getitem__) if names else None

    def __len__(self) -> int:
        return len(self.reader)

    def load(self, index: int) -> tuple[Image.Image, int]:
        # Not timm's own loading, which replaces broken files silently
        file, target, *_ = self.reader[index]
        with file:
            return load_image(file), -1 if target is None else int(target)

    def describe(self, index: int) -> str:
        try:
            return shown(self.dataset.filename(index, absolute=True))
        except (AttributeError, KeyError, NotImplementedError):
            return f"image {index}"


class TorchvisionImages(Source):
    """A torchvision data set: pairs of an image and its class."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name
        names = getattr(dataset, "classes", None)
        self.classes = [str(name) for name in names] if names else None

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int) -> tuple[Image.Image, int]:
        image, target = self.dataset[index]
        return upright_rgb(image), int(target)

    def describe(self, index: int) -> str:
        samples = getattr(self.dataset, "samples", None)
        return str(samples[index][0]) if samples else f"{self.name}[{index}]"


def open_source(
    name: str, root: str | None, split: str, download: bool = False, **stream: Any
) -> Source | IterableImageDataset:
    """Opens a data set by timm's name for it, or `digits`; a stream if it is read sequentially.

    Args:
        name: "digits", or as for timm.data.create_dataset: "" for image folders, "torch/cifar10",
            "hfds/NAME", "wds/", "tfds/NAME", ...
        root: Its folder, as given or below $SOFTMAXFREE_DATA.
        split: Its part: the folder or name of the training or evaluation images.
        download: Let torchvision or TFDS download it.
        stream: Arguments of sequential data: is_training, batch_size, seed.
    """
    if name == "digits":
        _check_split(name, split, [*_TRAIN, *_EVALUATION])
        return Digits(split)
    in_folders = "/" not in name
    if in_folders or (name.startswith("torch/") and not download):
        root = find_root(root)
    if in_folders and Path(str(root)).is_dir():
        return _open_folders(Path(str(root)), split)
    if name.startswith("torch/"):
        _check_split(name, split, [*_TRAIN, *_EVALUATION])
    dataset = _create(name, root, split, download, stream)
    if isinstance(dataset, IterableImageDataset):
        return dataset
    source = (
        TimmImages(dataset)
        if isinstance(dataset, ImageDataset)
        else TorchvisionImages(dataset, name)
    )
    if len(source) == 0:
        raise UserError(f"the data set {name or root} has no images in its split {split!r}")
    source.origin = f"{name or root}, split {split}"
    return source


def _create(name: str, root: str | None, split: str, download: bool, stream: dict[str, Any]) -> Any:
    try:
        return create_dataset(
            name, root, split=split, search_split=False, download=download, **stream
        )
    except ModuleNotFoundError as error:
        raise UserError(
            f"the data set {name} needs {error.name}; install it with: pip install {error.name}"
        ) from error
    except (AssertionError, RuntimeError, ValueError, FileNotFoundError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UserError(
            f"the data set {name or root!r} cannot be opened: {reason or type(error).__name__}"
        ) from error


def _open_folders(root: Path, split: str) -> Source:
    """Image folders: root/SPLIT/CLASS/IMAGE, or root/CLASS/IMAGE, of which a fifth is held out."""
    folder, shared = _folder_of_split(root, split)
    with user_file(shown(folder)):
        images = FolderImages(folder)
    if not images.classes:
        raise UserError(
            f"{shown(folder)} has no images in folders of their classes: it takes "
            f"{_layout(folder)}, or train and val with such folders in them, and names of images "
            f"that end in {', '.join(SUFFIXES)}"
        )
    if images.classes[0] == "":
        found = next(i for i, (_, target) in enumerate(images.samples) if target == 0)
        raise UserError(
            f"{images.describe(found)} lies in no folder of a class: each image must lie in the "
            f"folder of its class, {_layout(folder)}"
        )
    images.origin = shown(folder)
    if not shared:
        return images
    if set(images.classes) <= {*_TRAIN, *_EVALUATION}:
        raise UserError(
            f"{shown(root)} has splits without classes: each image must lie in the folder of its "
            f"class, {_layout(root / images.classes[0])}"
        )
    held_out = split in _EVALUATION
    part = View(images, _fifth_of_each_class(images, held_out))
    part.origin = (
        f"a fifth of each class in {shown(folder)}, chosen by a hash of the file's name"
        if held_out
        else f"{shown(folder)}, without the fifth held out"
    )
    return part


def _layout(folder: Path) -> str:
    return f"{shown(folder)}/CLASS/IMAGE"


def _folder_of_split(root: Path, split: str) -> tuple[Path, bool]:
    """The folder of a split or of a synonym, and whether training and evaluation share it.

    They share root if it has no splits, and root/train if that is its only folder. A folder without
    folders is not a split: `train` may be a class.
    """
    if not split:
        return root, False
    with user_file(shown(root)):
        folders = _folders(root)
        splits = [path.name for path in folders if _folders(path)]
    synonyms = next((group for group in (_TRAIN, _EVALUATION) if split in group), ())
    if not synonyms and (root / split).is_dir():
        return root / split, False
    if synonyms and not {*splits} & {*_TRAIN, *_EVALUATION}:
        return root, True
    if synonyms and len(folders) == 1 and splits[0] in _TRAIN:
        return folders[0], True
    for name in (split, *(other for other in synonyms if other != "test" or split == "validation")):
        if name in splits:
            return root / name, False
    found = [shown(path.name) for path in folders]
    part = "val" if split in _EVALUATION else "train"
    what = f"folder of a {part} split, {' or '.join(synonyms)}" if synonyms else f"split {split!r}"
    raise UserError(
        f"{shown(root)} has no {what}: its folders are {', '.join(found[:6])}"
        f"{' ...' if len(found) > 6 else ''}; rename one, or name it with --data.{part}_split"
    )


def _folders(root: Path) -> list[Path]:
    """The folders in a folder, without hidden ones."""
    return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")


def _fifth_of_each_class(images: FolderImages, held_out: bool) -> list[int]:
    """The numbers of a fifth of each class, or of all others, by a hash of the files' names.

    The same images are held out on every machine, wherever the folder lies.
    """
    samples, found = images.samples, []
    hashes = [hashlib.sha256(os.fsencode(os.path.basename(path))).digest() for path, _ in samples]
    by_class: dict[int, list[int]] = {}
    for number in sorted(range(len(samples)), key=hashes.__getitem__):
        by_class.setdefault(samples[number][1], []).append(number)
    for numbers in by_class.values():
        if len(numbers) == 1:
            raise UserError(
                f"{images.describe(numbers[0])} is the only image of its class: a class takes at "
                "least two, one to train on and one to validate with"
            )
        count = max(1, len(numbers) // HELD_OUT)
        found += numbers[:count] if held_out else numbers[count:]
    return sorted(found)


def _check_split(name: str, split: str, known: list[str]) -> None:
    if split not in known:
        raise UserError(f"{name} has no split {split!r}: take one of {', '.join(known)}")
