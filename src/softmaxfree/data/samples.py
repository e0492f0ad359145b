"""Samples: images prepared for the model, with randomness from counters."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from PIL import Image
from timm.data import IterableImageDataset
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .counters import generators_kept, seed_sample
from .image_files import upright_rgb
from .sources import Source

NOTHING = -1
"""Class of a missing sample: padding, or an unreadable image."""

_TRIES = 20
"""Neighbours tried instead of an unreadable image."""

Transform = Callable[[Image.Image], Tensor]


class Sample(NamedTuple):
    image: Tensor
    target: Any
    number: int
    """Number of the image in its data set."""
    broken: tuple[tuple[str, str], ...] = ()
    """Unreadable files that this sample replaces, with reasons."""


class Batch(NamedTuple):
    images: Tensor
    """(B, 3, H, W)"""
    targets: Tensor
    """(B), -1 for missing samples."""
    indices: Tensor
    """(B), numbers of the images in their data set."""
    broken: tuple[tuple[str, str], ...]


def collate(samples: list[Sample]) -> Batch:
    return Batch(
        torch.stack([sample.image for sample in samples]),
        torch.tensor([sample.target for sample in samples]),
        *numbers_and_broken(samples),
    )


def numbers_and_broken(samples: list[Sample]) -> tuple[Tensor, tuple[tuple[str, str], ...]]:
    """The last two fields of every batch: numbers (B) of the images, and unreadable files."""
    return (
        torch.tensor([sample.number for sample in samples]),
        tuple(pair for sample in samples for pair in sample.broken),
    )


class Samples(Dataset[Sample]):
    """Samples by (epoch, index); an index of -1 is padding.

    An unreadable image is reported in the sample. In training its neighbour replaces it; in
    evaluation it is left out like padding.

    Args:
        prepare: Prepares an image and its target for the model.
        nothing: Image and target of a missing sample.
    """

    def __init__(
        self,
        source: Source,
        prepare: Callable[[Image.Image, Any], tuple[Tensor, Any]],
        nothing: tuple[Tensor, Any],
        seed: int,
        training: bool,
    ) -> None:
        self.source, self.prepare, self.nothing = source, prepare, nothing
        self.seed, self.training = seed, training

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Sample]:
        """The samples of a batch, which loaders request together."""
        with generators_kept():
            return [self._sample(epoch, index) for epoch, index in keys]

    def _sample(self, epoch: int, index: int) -> Sample:
        if index == NOTHING:
            return Sample(*self.nothing, index)
        broken: tuple[tuple[str, str], ...] = ()
        for attempt in range(_TRIES if self.training else 1):
            number = (index + attempt) % len(self.source)
            try:
                image, target = self.source.load(number)
            except Exception as error:  # decoders raise anything on a broken file
                reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
                broken += ((self.source.describe(number), reason),)
                continue
            seed_sample(self.seed, epoch, number)
            return Sample(*self.prepare(image, target), number, broken)
        return Sample(*self.nothing, index, broken)


class ImageAlone:
    """Transforms the image and keeps its class."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, image: Image.Image, target: int) -> tuple[Tensor, int]:
        return self.transform(image), target


class SampleStream(IterableDataset[Sample]):
    """Samples of a data set that is read sequentially, divided between processes and workers."""

    def __init__(self, dataset: IterableImageDataset, transform: Transform, seed: int) -> None:
        self.dataset, self.transform, self.seed = dataset, transform, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker = info.id if info else 0
        rank = dist.get_rank() if dist.is_initialized() else 0
        for number, (image, target) in enumerate(self.dataset):
            with generators_kept():
                seed_sample(self.seed, self.epoch, rank, worker, number)
                sample = Sample(self.transform(upright_rgb(image)), int(target), number)
            yield sample
