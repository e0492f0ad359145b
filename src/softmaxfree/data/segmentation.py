"""Images with a class for every pixel as a Lightning data module."""

from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from ..errors import UserError, check_size
from .base import SplitData
from .label_maps import IGNORE, Colour, open_label_maps
from .samples import Sample, numbers_and_broken
from .sources import Source

_PADDING = (124, 116, 104)
"""The mean colour of ImageNet."""

_DRAWS = 10
"""Most attempts to replace a crop that one class dominates."""


class SegmentationBatch(NamedTuple):
    images: list[Tensor]
    """(3, H, W) each, uint8; in training all have the size of the crop."""
    labels: list[Tensor | None]
    """(H, W) each, uint8, 255 for ignored pixels; None for padding."""
    indices: Tensor
    """(B), numbers of the images in their data set."""
    broken: tuple[tuple[str, str], ...]

    @property
    def incomplete(self) -> bool:
        return any(labels is None for labels in self.labels)


def collate_labelled(samples: list[Sample]) -> SegmentationBatch:
    return SegmentationBatch(
        [sample.image for sample in samples],
        [sample.target for sample in samples],
        *numbers_and_broken(samples),
    )


class SegmentationData(SplitData):
    """Images with a class for every pixel.

    In training, images are randomly scaled, cropped, flipped and recoloured. In evaluation, images
    are resized and labels are not.

    Args:
        name: digit_scenes (composed of scikit-learn's digits, embedded), ade20k or cityscapes (the
            official layouts), or folders (any folders of images and labels).
        root: The folder of the data, as given or below $SOFTMAXFREE_DATA.
        train_split: The part to train on.
        val_split: The part that validation scores.
        test_split: The part that `test` scores; val_split if not given.
        image_folder: For folders, the images below root, such as images/{split}.
        label_folder: For folders, the labels below root: PNGs with the names of the images.
        label_suffix: For folders, the suffix of the labels' names, such as _L.
        classes: For folders, names of the values 0, 1, ... of labels, without ignored values.
        ignore: For folders, values of ignored pixels; 255 if not given.
        palette: For folders, a colour [red, green, blue] for each class; generated if not given.
        batch_size: Images a step, over all processes and all accumulated batches.
        eval_batch_size: Images a process loads at a time; they are scored one by one.
        num_workers: Processes that load images, for each process that trains.
        crop: Side of training crops, or their height and width.
        scale: Range of the factor by which training images are scaled before cropping.
        train_size: Shorter side of training images at a factor of 1; their own if not given.
        flip: Probability of a horizontal flip.
        photometric: Distort brightness, contrast, saturation and hue at random.
        cat_max_ratio: Draw a crop again, up to 10 times, if one class has more than this fraction
            of its labelled pixels; 1 accepts every crop.
        eval_size: Length of the shorter side of images in evaluation; unchanged if not given.
        eval_max_size: Largest length of the longer side then.
        seed: Order and augmentation are functions of (seed, epoch, image).
    """

    nothing = torch.zeros(3, 1, 1, dtype=torch.uint8), None
    collate = staticmethod(collate_labelled)

    def __init__(
        self,
        name: str = "digit_scenes",
        root: str | None = None,
        train_split: str = "train",
        val_split: str = "validation",
        test_split: str | None = None,
        image_folder: str | None = None,
        label_folder: str | None = None,
        label_suffix: str | None = None,
        classes: list[str] | None = None,
        ignore: list[int] | None = None,
        palette: list[Colour] | None = None,
        batch_size: int = 16,
        eval_batch_size: int = 1,
        num_workers: int = 2,
        crop: int | tuple[int, int] = 512,
        scale: tuple[float, float] = (0.5, 2.0),
        train_size: int | None = None,
        flip: float = 0.5,
        photometric: bool = True,
        cat_max_ratio: float = 0.75,
        eval_size: int | None = None,
        eval_max_size: int | None = None,
        seed: int = 0,
    ) -> None:
        test_split = val_split if test_split is None else test_split  # "" is a split
        splits = {"train": train_split, "val": val_split, "test": test_split}
        super().__init__(splits, batch_size, eval_batch_size, num_workers, seed)
        check_size(crop, "--data.crop")
        check_size(train_size, "--data.train_size")
        check_size(eval_size, "--data.eval_size")
        check_size(eval_max_size, "--data.eval_max_size")
        self.dataset, self.root = name, root
        options = {
            "image_folder": image_folder,
            "label_folder": label_folder,
            "label_suffix": label_suffix,
            "classes": classes,
            "ignore": ignore,
            "palette": palette,
        }
        self.options = {key: value for key, value in options.items() if value is not None}
        size = (crop, crop) if isinstance(crop, int) else crop
        self.augment = Augmentation(size, scale, flip, photometric, cat_max_ratio, train_size)
        self.resize = Resized(eval_size, eval_max_size)

    def open(self, part: str) -> Source:
        return open_label_maps(self.dataset, self.root, self.splits[part], **self.options)

    def prepare(self, training: bool) -> Any:
        return self.augment if training else self.resize

    @property
    def palette(self) -> list[Colour]:
        """A colour for each class."""
        return next((source.palette for source in self.sources.values()), [])


class Augmentation:
    """A random crop of a training image and its labels, scaled, flipped, recoloured and padded.

    The crop is chosen in the scaled image, but cut from the original and then resized, so that the
    rest of the image costs nothing at any scale.

    Args:
        crop: Height and width.
        others: As in SegmentationData.
    """

    def __init__(
        self,
        crop: tuple[int, int],
        scale: tuple[float, float],
        flip: float,
        photometric: bool,
        cat_max_ratio: float,
        train_size: int | None = None,
    ) -> None:
        if not 0 < scale[0] <= scale[1]:
            raise UserError(
                f"images cannot be scaled by {scale[0]} to {scale[1]}: "
                "give two factors above 0 with --data.scale, the smaller one first"
            )
        for name, part in (("flip", flip), ("cat_max_ratio", cat_max_ratio)):
            if not 0 <= part <= 1:
                raise UserError(f"--data.{name} is {part}: give a number from 0 to 1")
        self.crop, self.scale, self.flip = crop, scale, flip
        self.colour = Photometric() if photometric else None
        self.cat_max_ratio, self.train_size = cat_max_ratio, train_size

    def __call__(self, image: Image.Image, labels: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.scale
        factor = low + (high - low) * float(torch.rand(()))
        if self.train_size is not None:
            factor *= self.train_size / min(image.size)
        for _ in range(1 + _DRAWS):
            rows = Span.draw(self.crop[0], image.height, factor)
            columns = Span.draw(self.crop[1], image.width, factor)
            cut = labels[rows.nearest()][:, columns.nearest()]
            if _largest_part(cut) <= self.cat_max_ratio:
                break
        pixels = _resized(image, rows, columns)
        if torch.rand(()) < self.flip:
            pixels, cut = pixels.flip(-1), cut.flip(-1)
        if self.colour is not None:
            pixels = self.colour(pixels)
        padded = torch.tensor(_PADDING, dtype=torch.uint8)[:, None, None].repeat(1, *self.crop)
        padded[:, : rows.length, : columns.length] = pixels
        padded_labels = torch.full(self.crop, IGNORE, dtype=torch.uint8)
        padded_labels[: rows.length, : columns.length] = cut
        return padded, padded_labels


class Span(NamedTuple):
    """A part of one side of an image, in scaled pixels."""

    start: int
    length: int
    scaled: int
    """The whole side, scaled."""
    side: int
    """The whole side, unscaled."""

    @classmethod
    def draw(cls, longest: int, side: int, factor: float) -> "Span":
        scaled = max(1, round(side * factor))
        length = min(longest, scaled)
        return cls(int(torch.randint(scaled - length + 1, ())), length, scaled, side)

    def nearest(self) -> Tensor:
        """(length,), the original pixels that contain the centres of the scaled ones."""
        numbers = torch.arange(self.start, self.start + self.length)
        return (2 * numbers + 1) * self.side // (2 * self.scaled)

    def bounds(self) -> tuple[float, float]:
        """Start and end in original pixels."""
        end = (self.start + self.length) * self.side / self.scaled
        return self.start * self.side / self.scaled, min(end, self.side)


class Photometric(v2.RandomPhotometricDistort):
    """Without torchvision's permutation of colour channels: the sky is rarely red."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {**super().make_params(flat_inputs), "channel_permutation": None}


class Resized:
    """Resizes the shorter side of an image for scoring and leaves its labels unchanged."""

    def __init__(self, size: int | None, max_size: int | None) -> None:
        if max_size is not None and (size is None or max_size <= size):
            raise UserError(
                f"--data.eval_max_size {max_size} limits the longer side of images whose shorter "
                f"one is resized to --data.eval_size, which is {size}: give a smaller eval_size"
            )
        self.size, self.max_size = size, max_size

    def __call__(self, image: Image.Image, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.size is not None:
            image = tv.resize(image, [self.size], max_size=self.max_size)  # bilinear, antialiased
        return tv.pil_to_tensor(image).contiguous(), labels


def _resized(image: Image.Image, rows: Span, columns: Span) -> Tensor:
    (top, bottom), (left, right) = rows.bounds(), columns.bounds()
    size, box = (columns.length, rows.length), (left, top, right, bottom)
    return tv.pil_to_tensor(image.resize(size, Image.Resampling.BILINEAR, box))


def _largest_part(labels: Tensor) -> float:
    """Fraction of the most frequent class among labelled pixels; 1 if there are none."""
    counts = torch.bincount(labels.flatten(), minlength=256)[:IGNORE]
    return float(counts.max() / counts.sum()) if counts.any() else 1.0
