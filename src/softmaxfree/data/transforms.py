"""timm's transforms, with fused normalisation, a crop for small images and a fix for Pillow 12."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import posterize
from timm.data.transforms import MaybeToTensor
from torch import Tensor
from torchvision.transforms import Compose, Normalize, Resize


def evaluation_transform(size: int, **arguments: Any) -> Compose:
    """timm's evaluation transform: PIL image -> (3, size, size)."""
    return Compose(_fuse(create_transform(size, **arguments).transforms))


def training_transform(size: int, **arguments: Any) -> Compose:
    """timm's training transform: PIL image -> (3, size, size).

    train_crop_mode="pad" is not timm's: it mirrors the image by an eighth on all sides and crops it
    randomly to size, without resampling.
    """
    padded = arguments.get("train_crop_mode") == "pad"
    if padded:
        arguments["train_crop_mode"] = None
    first, *others = create_transform(size, is_training=True, separate=True, **arguments)
    if padded:
        first = Compose([Resize(size), MirroredCrop(size, arguments.get("hflip", 0.5))])
    parts = [part for stage in (first, *others) for part in stage.transforms]
    for part in parts:
        policies = [op for policy in getattr(part, "policy", []) for op in policy]
        for op in [*getattr(part, "ops", []), *policies]:
            if op.name.startswith("Posterize"):
                op.aug_fn = _posterize
    return Compose(_fuse(parts))


class MirroredCrop:
    """A random crop of a PIL image with mirrored margins (an eighth of the size), and a flip.

    It is one gather; torchvision's padding by reflection takes ten times as long.
    """

    def __init__(self, size: int, hflip: float) -> None:
        self.size, self.margin, self.hflip = size, size // 8, hflip

    def __call__(self, image: Image.Image) -> Image.Image:
        pixels = np.asarray(image)
        rows, columns = (self._places(side) for side in pixels.shape[:2])
        if torch.rand(()) < self.hflip:
            columns = columns[::-1]
        return Image.fromarray(pixels[rows[:, None], columns])

    def _places(self, side: int) -> np.ndarray:
        """(size,), the pixels of a side that the crop shows."""
        first = int(torch.randint(side - self.size + 2 * self.margin + 1, ())) - self.margin
        places = np.abs(np.arange(first, first + self.size))
        return side - 1 - np.abs(side - 1 - places)


class ToNormalised:
    """Converts an RGB PIL image to a normalised tensor (3, H, W) in one step."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.scale = (1 / (255 * std)).view(3, 1, 1)
        self.shift = (mean / std).view(3, 1, 1)

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.to(torch.float32, memory_format=torch.contiguous_format).mul_(
            self.scale
        ).sub_(self.shift)  # fmt: skip


def _fuse(parts: list[Any]) -> list[Any]:
    """Fuses conversion to a tensor and normalisation."""
    fused: list[Any] = []
    for part in parts:
        if isinstance(part, Normalize) and fused and isinstance(fused[-1], MaybeToTensor):
            fused[-1] = ToNormalised(torch.as_tensor(part.mean), torch.as_tensor(part.std))
        else:
            fused.append(part)
    return fused


def _posterize(image: Any, bits: int, **_: Any) -> Any:
    """At the highest magnitude timm asks for 0 bits, which Pillow 12 rejects."""
    return posterize(image, max(bits, 1))
