"""Labelled images by number: every format that timm reads, and the embedded digits."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import ImageDataset, IterableImageDataset, create_dataset
from timm.data.readers.reader_image_folder import ReaderImageFolder

from ..errors import UserError
from ..imports import needs
from .image_files import load_image, upright_rgb
from .paths import shown

HELD_OUT = 5
"""Hold out every fifth digit."""

_TRAIN = ("train", "training")
_EVALUATION = ("val", "valid", "validation", "eval", "evaluation", "test")


class Source(ABC):
    """Labelled samples by number; loading one may raise, which the caller handles."""

    classes: list[str] | None = None
    """Names of the classes by number, if the data set has them."""

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
        self.source, self.classes = source, source.classes
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

    def __len__(self) -> int:
        return len(self.numbers)

    def load(self, index: int) -> tuple[Image.Image, int]:
        number = self.numbers[index]
        return Image.fromarray(self.images[number]).convert("RGB"), int(self.targets[number])

    def describe(self, index: int) -> str:
        return f"digits[{self.numbers[index]}]"


class TimmImages(Source):
    """A data set that timm reads by number: image folders, a tar file, Hugging Face tables."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset, self.reader = dataset, dataset.reader
        names = getattr(self.reader, "class_to_idx", None)
        self.classes = sorted(names, key=names.__getitem__) if names else None

    def __len__(self) -> int:
        return len(self.reader)

    def load(self, index: int) -> tuple[Image.Image, int]:
        # Not timm's own loading, which replaces broken files silently and blocks on pipes.
        if isinstance(self.reader, ReaderImageFolder):
            path, target = self.reader.samples[index]
            image = load_image(Path(path))
        else:
            file, target, *_ = self.reader[index]
            with file:
                image = load_image(file)
        return image, -1 if target is None else int(target)

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
        root, split = _folder_of_split(Path(str(root)), split), ""
    elif name.startswith("torch/"):
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
    return source


def find_root(root: str | None) -> str:
    """The folder as given, or below $SOFTMAXFREE_DATA."""
    if root is None:
        raise UserError("this data set needs its folder: give it with --data.root")
    base = os.environ.get("SOFTMAXFREE_DATA")
    for path in [Path(root), *([Path(base) / root] if base else [])]:
        if path.exists():
            return str(path)
    below = f", nor {base}/{root}" if base else ""
    raise UserError(
        f"there is no folder {root}{below}; give the folder of the data with --data.root, "
        "or the one that it is in with the environment variable SOFTMAXFREE_DATA"
    )


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


def _folder_of_split(root: Path, split: str) -> str:
    """root/split, or the folder with a synonym of the split; root itself for no split."""
    if not split:
        return str(root)
    names = next((group for group in (_TRAIN, _EVALUATION) if split in group), ())
    for name in (split, *(other for other in names if other != "test")):
        if (root / name).is_dir():
            return str(root / name)
    found = sorted(path.name for path in root.iterdir() if path.is_dir())
    raise UserError(
        f"{root} has no split {split!r}: its folders are {', '.join(found[:6]) or 'none'}"
        f"{' ...' if len(found) > 6 else ''}"
    )


def _check_split(name: str, split: str, known: list[str]) -> None:
    if split not in known:
        raise UserError(f"{name} has no split {split!r}: take one of {', '.join(known)}")
