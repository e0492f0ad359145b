"""Images and their classes as a Lightning data module; timm reads and augments them."""

from typing import Any

import torch
from timm.data import IterableImageDataset
from timm.data.constants import DEFAULT_CROP_PCT, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from ..allow_list import INTERPOLATIONS, SMALLEST_CROP
from ..errors import UserError, check_size, visible
from .base import Data, several
from .loader import ResumableLoader
from .samples import NOTHING, Batch, ImageAlone, Samples, SampleStream, collate
from .sources import Cached, Source, open_source
from .transforms import evaluation_transform, training_transform

BATCH = 64
"""Images a step, if nothing else is given and there are as many."""


class ImageData(Data):
    """Labelled images for classification.

    Args:
        name: "digits" (scikit-learn's, embedded), or a name for timm.data.create_dataset: "" for
            image folders, "torch/cifar10", "hfds/NAME", "wds/", "tfds/NAME". If not given, image
            folders with a root, and digits without.
        root: The folder of the data, as given or below $SOFTMAXFREE_DATA.
        train_split: The part to train on; for image folders a folder below root.
        val_split: The part that validation scores. Image folders without one hold out a fifth of
            each class.
        test_split: The part that `test` scores; val_split if not given.
        download: Let torchvision or TFDS download missing data.
        batch_size: Images a step, over all processes and all accumulated batches. If not given, 64,
            and in `softmaxfree fit` a smaller power of two if there are fewer images.
        eval_batch_size: Images a process scores at a time; its share of batch_size if not given.
        num_workers: Processes that load images, for each process that trains.
        cache: Keep decoded images in memory, for data sets that fit into it.
        size: Side of the images, in pixels. Size, crop_pct, interpolation, mean and std are those
            of the backbone's weights if `softmaxfree fit` is not given them; otherwise ImageNet's.
        eval_sizes: Sides to score at, such as [224, 384, 512]. If not given, size; at the end of a
            run also 1.5 and 2 times size.
        crop_pct: In evaluation, the fraction of the resized image's side that the crop keeps: 0.875
            is 224 of 256.
        interpolation: Interpolation in evaluation: bicubic, bilinear.
        train_interpolation: Interpolation in training: bicubic, bilinear, random.
        mean: Mean of each colour channel, for values in [0, 1]; it is subtracted.
        std: Standard deviation of each colour channel, by which the result is divided.
        crop_mode: The training crop: timm's rrc (random size and shape), rkrc or rkrr; or pad, for
            small images: no scaling, with a mirrored margin of an eighth.
        crop_scale: In training, the range of the crop's area as a fraction of the image's.
        crop_ratio: In training, the range of the crop's width over its height.
        flip: Probability of a horizontal flip.
        color_jitter: Strength of random brightness, contrast and saturation.
        auto_augment: timm's name of an augmentation policy, such as rand-m9-mstd0.5-inc1.
        erase: Probability of erasing a random rectangle.
        seed: Order and augmentation are functions of (seed, epoch, image).
    """

    def __init__(
        self,
        name: str | None = None,
        root: str | None = None,
        train_split: str = "train",
        val_split: str = "validation",
        test_split: str | None = None,
        download: bool = False,
        batch_size: int | None = None,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        cache: bool = False,
        size: int | None = None,
        eval_sizes: list[int] | None = None,
        crop_pct: float | None = None,
        interpolation: str | None = None,
        train_interpolation: str = "random",
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
        crop_mode: str = "rrc",
        crop_scale: tuple[float, float] = (0.08, 1.0),
        crop_ratio: tuple[float, float] = (0.75, 4 / 3),
        flip: float = 0.5,
        color_jitter: float = 0.0,
        auto_augment: str | None = None,
        erase: float = 0.0,
        seed: int = 0,
    ) -> None:
        splits = {"train": train_split, "val": val_split, "test": test_split or val_split}
        batch_size = BATCH if batch_size is None else batch_size
        super().__init__(splits, batch_size, eval_batch_size, num_workers, seed)
        size = 224 if size is None else size
        crop_pct = DEFAULT_CROP_PCT if crop_pct is None else crop_pct
        interpolation = "bicubic" if interpolation is None else interpolation
        check_size(size, "--data.size")
        check_size(eval_sizes, "--data.eval_sizes")
        if not SMALLEST_CROP <= crop_pct <= 1:
            raise UserError(f"--data.crop_pct must be from {SMALLEST_CROP} to 1, got {crop_pct}")
        if std is not None and min(std) <= 0:
            raise UserError(f"--data.std must be above 0, got {std}")
        for option, probability in (("flip", flip), ("erase", erase)):
            if not 0 <= probability <= 1:
                raise UserError(f"--data.{option} must be from 0 to 1, got {probability:g}")
        for option, given, known in (
            ("interpolation", interpolation, INTERPOLATIONS),
            ("train_interpolation", train_interpolation, (*INTERPOLATIONS, "random")),
            ("crop_mode", crop_mode, ("rrc", "rkrc", "rkrr", "pad")),
        ):
            if given not in known:
                raise UserError(f"--data.{option} must be one of {', '.join(known)}, got {given!r}")
        if name == "digits" and root is not None:
            raise UserError(
                f"digits are embedded and have no folder, but --data.root is {root}: leave it out, "
                "or give --data.name '' for image folders"
            )
        name = name if name is not None else "digits" if root is None else ""
        self.dataset, self.root, self.download = name, root, download
        self.cache = cache
        self.size, self.eval_sizes = size, eval_sizes or [size]
        self.closing_sizes = eval_sizes or [size, size * 3 // 2, size * 2]
        self.preparation: dict[str, Any] = {
            "crop_pct": crop_pct,
            "interpolation": interpolation,
            "mean": tuple(mean or IMAGENET_DEFAULT_MEAN),
            "std": tuple(std or IMAGENET_DEFAULT_STD),
        }
        self.augmentation: dict[str, Any] = {
            "interpolation": train_interpolation,
            "train_crop_mode": crop_mode,
            "scale": tuple(crop_scale),
            "ratio": tuple(crop_ratio),
            "hflip": flip,
            "color_jitter": color_jitter or None,
            "auto_augment": auto_augment,
            "re_prob": erase,
            "re_mode": "pixel",
        }
        if auto_augment is not None:
            try:
                self._training_transform()
            except Exception as error:  # timm's are of all kinds
                raise UserError(
                    "--data.auto_augment must be a policy of timm, such as rand-m9-mstd0.5-inc1, "
                    f"augmix-m3-w3, original or v0, got {auto_augment!r}"
                ) from error

    def _training_transform(self) -> Any:
        return training_transform(self.size, **(self.preparation | self.augmentation))

    def check_classes(self, training: bool) -> None:
        super().check_classes(training)
        if training and self.classes and len(self.classes) < 2:
            where = visible(self.root or self.dataset)
            raise UserError(
                f"{where} has images of one class, {visible(self.classes[0])}: a classifier needs "
                f"at least two, {where}/CLASS/IMAGE"
            )

    def found(self) -> list[str]:
        """What the data is and how images are prepared, as lines to print."""
        classes, sources = self.classes or [], self.sources.values()
        empty = dict.fromkeys(name for one in sources for name in getattr(one, "left_out", ()))
        mean, std = (
            ", ".join(f"{value:.3g}" for value in self.preparation[name])
            for name in ("mean", "std")
        )
        return [
            *(
                f"{part:15}{len(source):,} images: {getattr(source, 'origin', self.dataset)}"
                for part, source in self.sources.items()
            ),
            *(
                [f"classes        {len(classes)}: {visible(several(classes, 10))}"]
                if classes
                else []
            ),
            *([f"left out       {several([*empty])} (no images)"] if empty else []),
            f"images         {self.size} x {self.size} pixels, mean {mean}, std {std}",
            f"batch          {self.batch_size} images",
        ]

    def prepare_data(self) -> None:
        if self.download:
            for part in self.splits:
                self.open(part)

    def open(self, part: str) -> Source | IterableImageDataset:
        batch = self.samples_per_process() if self.trainer else self.batch_size
        source = open_source(
            self.dataset,
            self.root,
            self.splits[part],
            download=self.download,
            is_training=part == "train",
            batch_size=batch,
            seed=self.seed,
        )
        return Cached(source) if self.cache and isinstance(source, Source) else source

    def train_dataloader(self) -> ResumableLoader:
        transform = self._training_transform()
        dataset = self._dataset(self.sources["train"], transform, self.size, training=True)
        return self.training_loader(dataset, collate=collate, check=self._check)

    def val_dataloader(self) -> list[ResumableLoader]:
        return self._evaluation(self.sources["val"])

    def test_dataloader(self) -> list[ResumableLoader]:
        return self._evaluation(self.sources["test"])

    def _evaluation(self, source: Source | IterableImageDataset) -> list[ResumableLoader]:
        return [
            self.evaluation_loader(
                self._dataset(
                    source, evaluation_transform(size, **self.preparation), size, training=False
                ),
                collate=collate,
                check=self._check,
            )
            for size in self.eval_sizes
        ]

    def _dataset(
        self, source: Source | IterableImageDataset, transform: Any, size: int, training: bool
    ) -> Samples | SampleStream:
        if isinstance(source, Source):
            nothing = torch.zeros(3, size, size), NOTHING
            return Samples(source, ImageAlone(transform), nothing, self.seed, training)
        source.set_loader_cfg(num_workers=self.num_workers)
        return SampleStream(source, transform, self.seed)

    def _check(self, batch: Batch, loader: ResumableLoader) -> None:
        check_targets(batch, loader, self.num_classes())


def check_targets(batch: Batch, loader: ResumableLoader, num_classes: int | None) -> None:
    """Raises UserError for a class that the model lacks, and in training for a missing sample."""
    largest = int(batch.targets.max())
    if num_classes is not None and largest >= num_classes:
        raise UserError(
            f"an image has class {largest}, but the model has num_classes={num_classes} "
            f"(0 to {num_classes - 1}): give --model.num_classes as many as the data has"
        )
    loader.refuse_missing(bool((batch.targets == NOTHING).any()))
