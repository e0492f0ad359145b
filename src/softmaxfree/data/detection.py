"""Images with objects as a Lightning data module; torchvision augments them."""

import logging
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from ..errors import UserError, check_size, visible
from .base import SplitData
from .samples import Sample, numbers_and_broken
from .scenes import Objects, Scenes, open_scenes
from .sources import Source, View

_log = logging.getLogger(__name__)


class SceneBatch(NamedTuple):
    images: list[Tensor]
    """(3, H, W) each, uint8."""
    targets: list[dict[str, Tensor] | None]
    """boxes (N, 4), labels (N) and optionally masks (N, H, W); None for padding."""
    indices: Tensor
    """(B), numbers of the images in their data set."""
    broken: tuple[tuple[str, str], ...]

    @property
    def incomplete(self) -> bool:
        return None in self.targets


def collate_scenes(samples: list[Sample]) -> SceneBatch:
    return SceneBatch(
        [sample.image for sample in samples],
        [sample.target for sample in samples],
        *numbers_and_broken(samples),
    )


class DetectionData(SplitData):
    """Images with boxes, classes and masks of objects.

    In training, images are randomly resized and flipped, and those without objects are left out.
    In evaluation, the detector resizes the original images.

    Args:
        name: digit_scenes (composed of scikit-learn's digits, embedded), coco (the official layout)
            or voc (PASCAL VOC's folders).
        root: The folder of the data, as given or below $SOFTMAXFREE_DATA.
        train_split: The part to train on, such as train2017.
        val_split: The part that validation scores.
        test_split: The part that `test` scores; val_split if not given.
        classes: Names of the classes for voc; all names in its files if not given.
        batch_size: Images a step, over all processes and all accumulated batches.
        eval_batch_size: Images a process loads at a time; they are scored one by one.
        num_workers: Processes that load images, for each process that trains.
        sizes: In training, lengths of the shorter side, drawn at random for each image: [800], or
            [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800].
        max_size: Largest length of the longer side.
        flip: Probability of a horizontal flip.
        vertical_flip: Probability of a vertical flip.
        color_jitter: Strength of random brightness, contrast and saturation.
        seed: Order and augmentation are functions of (seed, epoch, image).
    """

    nothing = torch.zeros(3, 1, 1, dtype=torch.uint8), None
    collate = staticmethod(collate_scenes)

    def __init__(
        self,
        name: str = "digit_scenes",
        root: str | None = None,
        train_split: str = "train",
        val_split: str = "validation",
        test_split: str | None = None,
        classes: list[str] | None = None,
        batch_size: int = 16,
        eval_batch_size: int = 1,
        num_workers: int = 2,
        sizes: list[int] | None = None,
        max_size: int = 1333,
        flip: float = 0.5,
        vertical_flip: float = 0.0,
        color_jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        splits = {"train": train_split, "val": val_split, "test": test_split or val_split}
        super().__init__(splits, batch_size, eval_batch_size, num_workers, seed)
        check_size(sizes, "--data.sizes")
        check_size(max_size, "--data.max_size")
        self.dataset, self.root, self.given_classes = name, root, classes
        self.augment = Augmentation(sizes or [800], max_size, flip, vertical_flip, color_jitter)

    def open(self, part: str) -> Source:
        module = self.trainer.lightning_module if self.trainer else None
        masks = getattr(module, "learns_masks", True)
        split = self.splits[part]
        scenes = open_scenes(self.dataset, self.root, split, self.given_classes, masks)
        if module is not None and masks and not scenes.has_masks:
            raise UserError(
                f"the detector learns masks, but {self.dataset} has none: "
                "give --model.detector retinanet"
            )
        for what, why in scenes.skipped.items():
            _log.warning("skipped %s: %s", visible(what), visible(why))
        return with_objects(scenes) if part == "train" else scenes

    def prepare(self, training: bool) -> Any:
        return self.augment if training else as_it_is


def with_objects(scenes: Scenes) -> Source:
    """The scenes that have an object to train on."""
    numbers = [index for index in range(len(scenes)) if not scenes.is_empty(index)]
    if not numbers:
        raise UserError("no image of the training split has an object to learn from")
    return View(scenes, numbers)


class Augmentation:
    """Randomly flips, recolours and resizes a training image with its boxes and masks."""

    def __init__(
        self,
        sizes: list[int],
        max_size: int,
        flip: float,
        vertical_flip: float,
        color_jitter: float,
    ) -> None:
        jitter = [v2.ColorJitter(color_jitter, color_jitter, color_jitter)] if color_jitter else []
        self.transform = v2.Compose(
            [
                *jitter,
                v2.RandomShortestSize(sizes, max_size),
                v2.RandomHorizontalFlip(flip),
                v2.RandomVerticalFlip(vertical_flip),
                v2.SanitizeBoundingBoxes(labels_getter=_of_objects),
            ]
        )

    def __call__(self, image: Image.Image, objects: Objects) -> tuple[Tensor, dict[str, Tensor]]:
        target: dict[str, Tensor] = {
            "boxes": tv_tensors.BoundingBoxes(
                objects.boxes, format="XYXY", canvas_size=(image.height, image.width)
            ),
            "labels": objects.labels,
        }
        if objects.masks is not None:
            target["masks"] = tv_tensors.Mask(objects.masks)
        pixels, target = self.transform(tv_tensors.Image(image), target)
        return pixels.as_subclass(Tensor), {k: v.as_subclass(Tensor) for k, v in target.items()}


def _of_objects(inputs: Any) -> tuple[Tensor, ...]:
    """What is removed together with a box that is too small after resizing."""
    target = inputs[1]
    return tuple(target[name] for name in ("labels", "masks") if name in target)


def as_it_is(image: Image.Image, objects: Objects) -> tuple[Tensor, dict[str, Tensor]]:
    """An image for scoring; its objects are in the ground truth."""
    return tv_tensors.Image(image).as_subclass(Tensor), {}
