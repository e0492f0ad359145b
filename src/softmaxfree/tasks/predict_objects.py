"""Finds the objects on an image by a detector, and draws them."""

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ..models.weights import Weights
from ..ops.tracing import ceil_div
from ..trust import built
from .coco_scores import detections
from .detection import Detection

COLOURS = (
    "#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000",
    "#808000", "#000075", "#f032e6", "#469990",
)  # fmt: skip
"""Colours of the classes, used in turn."""

READABLE = 400
"""The least pixels of the shorter side of a drawing."""
KEPT = ("score", "bbox", "segmentation")


class ObjectFinder:
    """A trained detector with the names of its classes.

    Args:
        weights: A detector's, see `softmaxfree.models.weights`.
        size: Shorter side to resize images to; as in training if not given.
    """

    def __init__(self, weights: Weights, size: int | None = None) -> None:
        names = (
            "detector", "backbone", "num_classes", "attention", "tie_qk", "options", "width",
            "size", "max_size", "mean", "std", "detector_options",
        )  # fmt: skip
        arguments = weights.arguments(*names)
        arguments |= {"size": size} if size else {}
        self.task = built(lambda: Detection(**arguments), weights.state)
        self.classes: list[str] = weights.entries("classes")["classes"]

    @torch.inference_mode()
    def find(
        self, image: Image.Image, threshold: float
    ) -> tuple[Image.Image, list[dict[str, Any]]]:
        """The image with its objects drawn on it, and the objects in descending order of score.

        Each is {"class", "index", "score", "bbox" (x, y, width, height)} and, with masks,
        "segmentation", both as COCO writes them.
        """
        pixels = pil_to_tensor(image)
        (found,) = self.task([pixels.to(self.task.device)])
        sure = found["scores"] >= threshold
        found = {name: values[sure].cpu() for name, values in found.items()}
        numbers = list(range(len(self.classes)))
        objects = [
            {
                "class": self.classes[entry["category_id"]],
                "index": entry["category_id"],
                **{name: entry[name] for name in KEPT if name in entry},
            }
            for entry in detections(found, 0, numbers, self.task.first_label)
        ]
        return to_pil_image(draw(pixels, found, objects)), objects


def draw(image: Tensor, found: dict[str, Tensor], objects: list[dict[str, Any]]) -> Tensor:
    """The image (3, H, W), uint8, with boxes, classes, scores and masks; a small one enlarged."""
    scale = ceil_div(READABLE, min(image.shape[1:]))
    image = enlarged(image, scale)
    if not objects:
        return image
    colours: list[Any] = [COLOURS[entry["index"] % len(COLOURS)] for entry in objects]
    if "masks" in found:
        masks = enlarged(found["masks"][:, 0] > 0.5, scale)
        image = draw_segmentation_masks(image, masks, 0.5, colours)
    return draw_bounding_boxes(
        image,
        found["boxes"] * scale,
        [f"{entry['class']} {entry['score']:.2f}" for entry in objects],
        colours,
        width=2,
        label_colors="white",
        label_background_colors=colours,
        fill_labels=True,
    )


def enlarged(x: Tensor, scale: int) -> Tensor:
    """(..., H, W) -> (..., scale H, scale W), pixel by pixel."""
    return x.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
