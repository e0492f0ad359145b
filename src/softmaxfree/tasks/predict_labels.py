"""Labels the pixels of an image by a segmenter, and draws them."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from ..data.image_files import check_resized
from ..data.segmentation import Resized
from ..models.weights import Weights
from ..trust import built
from .segmentation import Segmentation

LINE = 18
"""Pixels from one line of the legend to the next."""


class Labeller:
    """A trained segmenter, with names and colours of its classes.

    Args:
        weights: A segmenter's, see `softmaxfree.models.weights`.
        size: Shorter side to resize images to; as in the run's validation if not given.
    """

    def __init__(self, weights: Weights, size: int | None = None) -> None:
        names = (
            "decoder", "backbone", "num_classes", "attention", "tie_qk", "options", "width",
            "auxiliary", "window", "step", "mean", "std",
        )  # fmt: skip
        arguments = weights.arguments(*names)
        self.task = built(lambda: Segmentation(**arguments), weights.state)
        labels = weights.entries("classes", "palette")
        self.classes: list[str] = labels["classes"]
        self.palette = np.array(labels["palette"], dtype=np.uint8)
        self.resize = Resized(size or labels.get("size"), None if size else labels.get("max_size"))

    @torch.inference_mode()
    def label(self, image: Image.Image) -> Image.Image:
        """The class of every pixel, as an image of numbers with the data set's palette."""
        if self.resize.size is not None and self.resize.max_size is None:
            check_resized(image, self.resize.size)
        pixels, _ = self.resize(image, torch.empty(0))
        logits = self.task(pixels.to(self.task.device)).unsqueeze(0).cpu()
        if logits.shape[-2:] != (image.height, image.width):
            size = (image.height, image.width)
            logits = F.interpolate(logits, size, mode="bilinear", align_corners=False)
        labels = Image.fromarray(logits.argmax(1)[0].to(torch.uint8).numpy(), mode="P")
        labels.putpalette(self.palette.tobytes())
        return labels

    def shares(self, labels: Image.Image) -> dict[str, float]:
        """The share of the image of each class found, in descending order."""
        counts = np.bincount(np.asarray(labels).ravel(), minlength=len(self.classes))
        order = np.argsort(-counts, kind="stable")
        return {self.classes[n]: float(counts[n] / counts.sum()) for n in order if counts[n]}

    def overlay(self, image: Image.Image, labels: Image.Image) -> Image.Image:
        """The image under the colours of its classes, beside a legend."""
        blended = Image.blend(image, labels.convert("RGB"), 0.5)
        present = list(self.shares(labels))
        font = ImageFont.load_default(12)
        width = 12 + LINE + max(round(font.getlength(name)) for name in present)
        height = max(image.height, LINE * len(present) + 8)
        picture = Image.new("RGB", (image.width + width, height), "white")
        picture.paste(blended, (0, 0))
        draw = ImageDraw.Draw(picture)
        for line, name in enumerate(present):
            x, y = image.width + 6, 4 + LINE * line
            colour = tuple(self.palette[self.classes.index(name)].tolist())
            draw.rectangle((x, y + 2, x + 12, y + 14), fill=colour, outline="black")
            draw.text((x + LINE, y + 1), name, fill="black", font=font)
        return picture
