"""Images and their classes as a Lightning data module, read by timm, augmented by timm."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from timm.data import IterableImageDataset

from .loader import ResumableLoader, ShardedSampler, prepare_worker
from .samples import Samples, SampleStream, collate
from .sources import Cached, Source, open_source
from .transforms import evaluation_transform, training_transform


class ImageData(LightningDataModule):
    """Labelled images for classification.

    Args:
        name: "digits" (scikit-learn's, embedded), or a name as timm.data.create_dataset takes it:
            "" for image folders, "torch/cifar10", "hfds/NAME", "wds/", "tfds/NAME".
        root: The folder of the data, as given or below $SOFTMAXFREE_DATA.
        train_split: The part to train on; for image folders a folder below root.
        val_split: The part that validation scores.
        test_split: The part that `test` scores; val_split if not given.
        download: Let torchvision or TFDS fetch the data if it is not there.
        batch_size: Images a step, over all processes and all accumulated batches.
        eval_batch_size: Images a process scores at a time; its share of batch_size if not given.
        num_workers: Processes that load images, for each process that trains.
        cache: Keep decoded images in memory, for data sets that fit into it.
        size: Side of the images, in pixels.
        eval_sizes: Sides to score at, such as [224, 384, 512]; size alone if not given.
        crop_pct: In evaluation, the part of the resized image's side that the crop keeps: 0.875 is
            224 out of 256.
        interpolation: How images are resized in evaluation: bicubic, bilinear.
        train_interpolation: How they are resized in training: bicubic, bilinear, random.
        mean: Subtracted from the colours of an image in [0, 1].
        std: What the result is divided by.
        crop_mode: The training crop: timm's rrc (of random size and shape), rkrc or rkrr; or pad,
            at the image's own scale, with a mirrored margin of an eighth, for small images.
        crop_scale: In training, the range of the crop's area, as a part of the image's.
        crop_ratio: In training, the range of the crop's width over its height.
        flip: Probability of a horizontal flip.
        color_jitter: Strength of random brightness, contrast and saturation.
        auto_augment: timm's name of an augmentation policy, such as rand-m9-mstd0.5-inc1.
        erase: Probability of erasing a random rectangle.
        seed: Order and augmentation are functions of (seed, epoch, image).
    """

    def __init__(
        self,
        name: str = "digits",
        root: str | None = None,
        train_split: str = "train",
        val_split: str = "validation",
        test_split: str | None = None,
        download: bool = False,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        cache: bool = False,
        size: int = 224,
        eval_sizes: list[int] | None = None,
        crop_pct: float = 0.875,
        interpolation: str = "bicubic",
        train_interpolation: str = "random",
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        crop_mode: str = "rrc",
        crop_scale: tuple[float, float] = (0.08, 1.0),
        crop_ratio: tuple[float, float] = (0.75, 4 / 3),
        flip: float = 0.5,
        color_jitter: float = 0.0,
        auto_augment: str | None = None,
        erase: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dataset, self.root, self.download = name, root, download
        self.train_split, self.val_split = train_split, val_split
        self.test_split = test_split or val_split
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_workers, self.cache, self.seed = num_workers, cache, seed
        self.size, self.eval_sizes = size, eval_sizes or [size]
        self.preparation: dict[str, Any] = {
            "crop_pct": crop_pct,
            "interpolation": interpolation,
            "mean": tuple(mean),
            "std": tuple(std),
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
        self.sources: dict[str, Source | IterableImageDataset] = {}
        self.training: ResumableLoader | None = None
        self.resumed: dict[str, int] | None = None

    def prepare_data(self) -> None:
        if self.download:
            for split in {self.train_split, self.val_split, self.test_split}:
                self._open(split, training=False)

    def setup(self, stage: str) -> None:
        parts = {
            "fit": [("train", self.train_split), ("val", self.val_split)],
            "validate": [("val", self.val_split)],
            "test": [("test", self.test_split)],
        }
        for part, split in parts.get(stage, []):
            if part not in self.sources:
                self.sources[part] = self._open(split, training=part == "train")
        self._check_classes()

    def _open(self, split: str, training: bool) -> Source | IterableImageDataset:
        batch = self.images_per_process() if self.trainer else self.batch_size
        source = open_source(
            self.dataset,
            self.root,
            split,
            download=self.download,
            is_training=training,
            batch_size=batch,
            seed=self.seed,
        )
        return Cached(source) if self.cache and isinstance(source, Source) else source

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, where the data set tells them."""
        found = [source.classes for source in self.sources.values() if isinstance(source, Source)]
        return next((classes for classes in found if classes), None)

    def _check_classes(self) -> None:
        known = {
            part: source.classes
            for part, source in self.sources.items()
            if isinstance(source, Source) and source.classes
        }
        expected = self._num_classes()
        for part, classes in known.items():
            if expected is not None and len(classes) != expected:
                raise ValueError(
                    f"the data has {len(classes)} classes in its {part} split, but the model has "
                    f"num_classes={expected}: give --model.num_classes {len(classes)}"
                )
            if classes != self.classes:
                raise ValueError(
                    f"the classes of the {part} split are not those of the training split, "
                    f"so that their numbers differ: {_first_difference(classes, self.classes)}"
                )

    def _num_classes(self) -> int | None:
        module = self.trainer.lightning_module if self.trainer else None
        return getattr(module, "num_classes", None)

    def images_per_process(self) -> int:
        """Images that a process takes at a time."""
        assert self.trainer is not None
        processes, accumulated = self.trainer.world_size, self.trainer.accumulate_grad_batches
        share, rest = divmod(self.batch_size, processes * accumulated)
        if rest or not share:
            raise ValueError(
                f"a batch of {self.batch_size} images cannot be shared equally by {processes} "
                f"processes of {accumulated} accumulated batches: give --data.batch_size a "
                f"multiple of {processes * accumulated}"
            )
        return share

    def describe(self, indices: Sequence[int]) -> list[str]:
        """Files or numbers of training images, for messages."""
        source = self.sources.get("train")
        if isinstance(source, Source):
            return [source.describe(index) for index in indices]
        return [f"image {index} of a worker's stream" for index in indices]

    def train_dataloader(self) -> ResumableLoader:
        assert self.trainer is not None
        source, share = self.sources["train"], self.images_per_process()
        length = len(source)
        if isinstance(source, Source) and length < self.batch_size:
            raise ValueError(
                f"the training split has {length} images, fewer than one batch of "
                f"{self.batch_size}: give a smaller --data.batch_size"
            )
        transform = training_transform(self.size, **(self.preparation | self.augmentation))
        self.training = self._loader(source, transform, self.size, share, training=True)
        if self.resumed:
            self.training.load_state_dict(self.resumed)
            self.resumed = None
        return self.training

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch; Lightning's own saving of it is not read in time to matter.

        (It restores loaders when it restores its loops, but makes them before, for whoever asks
        how many steps there will be.)
        """
        return self.training.state_dict() if self.training else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict

    def val_dataloader(self) -> list[ResumableLoader]:
        return self._evaluation(self.sources["val"])

    def test_dataloader(self) -> list[ResumableLoader]:
        return self._evaluation(self.sources["test"])

    def _evaluation(self, source: Source | IterableImageDataset) -> list[ResumableLoader]:
        share = self.eval_batch_size or self.images_per_process()
        return [
            self._loader(
                source, evaluation_transform(size, **self.preparation), size, share, training=False
            )
            for size in self.eval_sizes
        ]

    def _loader(
        self,
        source: Source | IterableImageDataset,
        transform: Any,
        size: int,
        share: int,
        training: bool,
    ) -> ResumableLoader:
        trainer = self.trainer
        assert trainer is not None
        sampler = None
        dataset: Samples | SampleStream
        if isinstance(source, Source):
            dataset = Samples(source, transform, size, self.seed, training)
            sampler = ShardedSampler(
                len(source),
                self.seed,
                shuffle=training,
                whole=self.batch_size if training else 0,
                rank=trainer.global_rank,
                replicas=trainer.world_size,
            )
        else:
            source.set_loader_cfg(num_workers=self.num_workers)
            dataset = SampleStream(source, transform, self.seed)
        return ResumableLoader(
            dataset,
            epoch=lambda: trainer.current_epoch,
            num_classes=self._num_classes(),
            batch_size=share,
            sampler=sampler,
            drop_last=training,
            collate_fn=collate,
            num_workers=self.num_workers,
            worker_init_fn=prepare_worker,
            persistent_workers=self.num_workers > 0 and sampler is not None,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )


def _first_difference(classes: list[str], others: list[str] | None) -> str:
    for mine, theirs in zip(classes, others or []):
        if mine != theirs:
            return f"{mine} in place of {theirs}"
    return f"{len(classes)} in place of {len(others or [])}"
