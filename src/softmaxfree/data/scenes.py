"""Images with objects: boxes, classes and masks, and the ground truth to score them by."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from .sources import Source

Record = dict[str, Any]
"""An image or an annotation in COCO's JSON format."""


class Objects(NamedTuple):
    boxes: Tensor
    """(N, 4), x1 y1 x2 y2 in pixels."""
    labels: Tensor
    """(N), places in the list of classes."""
    masks: Tensor | None
    """(N, H, W) of 0 and 1, where the data set has them."""


class Scenes(Source):
    """Images by number with the objects in them."""

    classes: list[str]
    category_ids: list[int]
    """Of the classes, in the ground truth."""
    image_ids: list[int]
    """Of the images by number, in the ground truth."""
    has_masks: bool
    skipped: dict[str, str]
    """Annotations that are left out because they are broken, and why."""

    def __len__(self) -> int:
        return len(self.image_ids)

    @abstractmethod
    def load(self, index: int) -> tuple[Image.Image, Objects]:
        """An image in RGB and its objects; crowds are for scoring only, and not among them."""

    @abstractmethod
    def is_empty(self, index: int) -> bool:
        """Whether an image has no object to train on; the image is not opened."""

    @abstractmethod
    def annotated(self, index: int) -> tuple[Record, list[Record]]:
        """An image and its annotations, crowds with them, in COCO's JSON format."""

    def ground_truth(self) -> dict[str, list[Record]]:
        """All images, annotations and categories, for pycocotools to score by."""
        images, annotations = zip(*(self.annotated(index) for index in range(len(self))))
        flat = [annotation for group in annotations for annotation in group]
        return {
            "images": list(images),
            # Numbered from 1: pycocotools takes an annotation 0 for none.
            "annotations": [{**annotation, "id": n} for n, annotation in enumerate(flat, 1)],
            "categories": [
                {"id": number, "name": name}
                for number, name in zip(self.category_ids, self.classes)
            ],
        }


def open_scenes(
    name: str, root: str | None, split: str, classes: list[str] | None = None, masks: bool = True
) -> Scenes:
    """A data set of images with objects.

    Args:
        name: "digit_scenes".
        root: Its folder, as given or below $SOFTMAXFREE_DATA.
        split: Its part, by the name that the data set gives it.
        classes: Its classes in the order of their labels; all that it has, where not given.
        masks: Read the masks too, where it has them.
    """
    from .digit_scenes import DigitScenes  # the data sets build on this file

    openers: dict[str, Callable[[], Scenes]] = {
        "digit_scenes": lambda: DigitScenes(split, masks),
    }
    if name not in openers:
        raise ValueError(f"there is no data set of scenes {name!r}: take one of {_listed(openers)}")
    scenes = openers[name]()
    if classes is not None and scenes.classes != classes:
        raise ValueError(
            f"the classes given are {_listed(classes)}, those of {name} are "
            f"{_listed(scenes.classes)}; leave them out to take its own"
        )
    return scenes


def mask_tools() -> Any:
    """The module of pycocotools that encodes and decodes masks."""
    try:
        from pycocotools import mask  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "scoring and COCO's masks need pycocotools; "
            "install it with: pip install 'softmaxfree[detection]'"
        ) from error
    return mask


def _listed(names: Any) -> str:
    return ", ".join(names)
