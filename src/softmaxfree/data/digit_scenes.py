"""Scenes of handwritten digits: a small embedded data set for detection, composed on demand."""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from ..errors import UserError
from .counters import hash_counters
from .scenes import Objects, Record, Scenes, mask_tools
from .sources import _EVALUATION, _TRAIN, Digits

TRAINING_SCENES = 4000
VALIDATION_SCENES = 200
SIZE = 128
"""Side of a scene, in pixels."""
FEWEST, MOST = 2, 7
"""Range of the number of digits in a scene, before those that hide others are dropped."""
SMALLEST, TALLEST = 20, 56
"""Range of the height of a digit, in pixels."""

_SEED = 20210922
_PLACES = 12
"""Random places tried for each digit; the one with the least overlap is used."""
_INK = 0.45
"""Opacity from which a pixel belongs to the digit."""
_NOISE = 10
"""Amplitude of the noise, of 255."""

Mask = NDArray[np.bool_]


class DigitScenes(Scenes):
    """Coloured digits of scikit-learn on a smooth background; digits in front hide those behind.

    A scene is a function of its split and number. Validation scenes have held-out digits.
    """

    def __init__(self, split: str, masks: bool = True) -> None:
        if split not in (known := [*_TRAIN, *_EVALUATION]):
            raise UserError(f"digit_scenes has no split {split!r}: take one of {', '.join(known)}")
        digits = Digits(split)
        loaded = [digits.load(index) for index in range(len(digits))]
        # One pixel of margin (digits have 8 x 8) lets strokes at the edge fade out.
        self.digits = [(ImageOps.expand(image.convert("L"), 1), label) for image, label in loaded]
        self.held_out = split in _EVALUATION
        self.classes = [str(digit) for digit in range(10)]
        self.category_ids = list(range(1, 11))
        self.image_ids = list(
            range(1, 1 + (VALIDATION_SCENES if self.held_out else TRAINING_SCENES))
        )
        self.has_masks, self.skipped = masks, {}

    def load(self, index: int) -> tuple[Image.Image, Objects]:
        pixels, labels, masks = self._compose(index)
        boxes = torch.tensor([tight_box(mask) for mask in masks], dtype=torch.float32)
        stacked = torch.from_numpy(np.stack(masks).astype(np.uint8)) if self.has_masks else None
        return Image.fromarray(pixels), Objects(boxes, torch.tensor(labels), stacked)

    def describe(self, index: int) -> str:
        return f"digit_scenes[{index}]"

    def is_empty(self, index: int) -> bool:
        return False  # the first digit is always placed

    def annotated(self, index: int) -> tuple[Record, list[Record]]:
        _, labels, masks = self._compose(index)
        number = self.image_ids[index]
        image = {"id": number, "file_name": self.describe(index), "height": SIZE, "width": SIZE}
        return image, [self._annotation(number, *pair) for pair in zip(labels, masks)]

    def _annotation(self, image_id: int, label: int, mask: Mask) -> Record:
        x1, y1, x2, y2 = tight_box(mask)
        record: Record = {
            "image_id": image_id,
            "category_id": self.category_ids[label],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": int(mask.sum()),
            "iscrowd": 0,
        }
        if self.has_masks:
            encoded = mask_tools().encode(np.asfortranarray(mask, dtype=np.uint8))
            record["segmentation"] = {**encoded, "counts": encoded["counts"].decode()}
        return record

    def _compose(self, index: int) -> tuple[NDArray[np.uint8], list[int], list[Mask]]:
        """The pixels of a scene, the labels of its digits and their visible masks."""
        number = range(len(self))[index]
        rng = np.random.default_rng(hash_counters(_SEED, int(self.held_out), number))
        dark = bool(rng.integers(2))
        canvas = _background(rng, dark)
        labels: list[int] = []
        seen: list[Mask] = []
        areas: list[int] = []  # before other digits covered them
        corners: list[tuple[int, int, int]] = []  # x, y and side of each digit
        for _ in range(rng.integers(FEWEST, MOST + 1)):
            digit, label = self.digits[rng.integers(len(self.digits))]
            side = int(rng.integers(SMALLEST, TALLEST + 1)) * digit.height // 8
            colour = rng.integers(*((150, 256) if dark else (0, 106)), size=3)
            x, y = _place(rng, side, corners)
            opacity = np.asarray(digit.resize((side, side), Image.Resampling.BICUBIC)) / 255
            opacity = np.minimum(1, opacity * 1.4)  # most strokes are grey
            mask = np.zeros((SIZE, SIZE), dtype=bool)
            mask[y : y + side, x : x + side] = opacity > _INK
            left = [other & ~mask for other in seen]
            if any(2 * rest.sum() < area for rest, area in zip(left, areas)):
                continue  # it would hide more than half of another
            patch = canvas[y : y + side, x : x + side]
            patch += opacity[..., None] * (colour - patch)
            seen = [*left, mask]
            areas.append(mask.sum())
            labels.append(label)
            corners.append((x, y, side))
        return canvas.round().astype(np.uint8), labels, seen


def tight_box(mask: Mask) -> tuple[int, int, int, int]:
    """x1, y1, x2, y2 around the pixels of a mask."""
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _background(rng: np.random.Generator, dark: bool) -> NDArray[np.float32]:
    """(H, W, 3): a smooth gradient between random colours, with mild noise."""
    corners = rng.integers(*((0, 106) if dark else (150, 256)), size=(3, 3, 3), dtype=np.uint8)
    smooth = Image.fromarray(corners).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    noise = rng.integers(-_NOISE, _NOISE + 1, size=(SIZE, SIZE, 3), dtype=np.int8)
    return (np.asarray(smooth, dtype=np.float32) + noise).clip(0, 255)


def _place(
    rng: np.random.Generator, side: int, placed: list[tuple[int, int, int]]
) -> tuple[int, int]:
    """x and y of a square: of several random places, the one that overlaps the others least."""
    places = rng.integers(0, SIZE - side + 1, size=(_PLACES, 2))
    if not placed:
        return int(places[0, 0]), int(places[0, 1])
    others = np.array(placed)
    corner, sides = others[:, :2], others[:, 2:]
    start = np.maximum(places[:, None], corner)
    end = np.minimum(places[:, None] + side, corner + sides)
    overlap = (end - start).clip(0).prod(-1).sum(-1)
    x, y = places[overlap.argmin()]
    return int(x), int(y)
