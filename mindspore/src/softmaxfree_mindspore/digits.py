"""scikit-learn's handwritten digits, split, ordered and augmented as `softmaxfree fit` does it.

Its randomness comes from torch's and Python's generators, seeded by counters; here the same
numbers come from numpy's and Python's, so that both train on the same images in the same order.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image

HELD_OUT = 5
"""Every so many of the digits are held out."""

_WORD = 2**64 - 1


@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits of 8 x 8 pixels, or a part of them."""

    images: np.ndarray
    """(N, 8, 8) bytes."""
    targets: np.ndarray
    """(N,) classes."""

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Preparation:
    """How digits become images of a model."""

    size: int
    """Side of the images."""
    crop_scale: tuple[float, float]
    """In training, the range of the crop's area, as a part of the image's."""
    crop_ratio: tuple[float, float]
    """In training, the range of the crop's width over its height."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def to_score(self, digits: Digits) -> np.ndarray:
        """All of them, resized: (N, 3, size, size) float32."""
        side = (self.size, self.size)
        resized = [Image.fromarray(x).resize(side, Image.Resampling.BICUBIC) for x in digits.images]
        return self._normalised(resized)

    def to_train(
        self, digits: Digits, indices: np.ndarray, seed: int, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Some of them, cropped at random: (B, 3, size, size) float32, and their classes (B,)."""
        crops = [
            self._crop(Image.fromarray(digits.images[i]), hash_counters(seed, epoch, int(i)))
            for i in indices
        ]
        return self._normalised(crops), digits.targets[indices]

    def _crop(self, image: Image.Image, seed: int) -> Image.Image:
        """A random part of the image, of random shape, by random interpolation."""
        draw = random.Random(seed)
        box = self._box(draw, *image.size)
        how = draw.choice((Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
        return image.crop(box).resize((self.size, self.size), how)

    def _box(self, draw: random.Random, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom; all of the image if ten tries do not fit into it."""
        shapes = [math.log(bound) for bound in self.crop_ratio]
        for _ in range(10):
            area = draw.uniform(*self.crop_scale) * width * height
            shape = math.exp(draw.uniform(*shapes))
            w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if w <= width and h <= height:
                top, left = draw.randint(0, height - h), draw.randint(0, width - w)
                return left, top, left + w, top + h
        return 0, 0, width, height

    def _normalised(self, images: list[Image.Image]) -> np.ndarray:
        grey = np.stack([np.asarray(image) for image in images])[:, None].astype(np.float32) / 255
        mean, std = (np.array(x, np.float32).reshape(1, 3, 1, 1) for x in (self.mean, self.std))
        return (grey - mean) / std


def load_digits() -> tuple[Digits, Digits]:
    """Those to train on, and those held out."""
    from sklearn import datasets

    found = datasets.load_digits()
    images = (found.images * (255 / 16)).astype(np.uint8)
    # A fixed shuffle: neighbours in the file were written by one person.
    order = permutation(len(images), 0)
    held_out = np.arange(len(order)) % HELD_OUT == 0
    training, scored = order[~held_out], order[held_out]
    return (
        Digits(images[training], found.target[training]),
        Digits(images[scored], found.target[scored]),
    )


def epoch_batches(length: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Indices of an epoch's whole batches: (batches, batch_size)."""
    order = permutation(length, seed * 1_000_003 + epoch)
    return order[: length // batch_size * batch_size].reshape(-1, batch_size)


def permutation(length: int, seed: int) -> np.ndarray:
    """torch.randperm of a generator with that seed: (length,).

    Both libraries have the Mersenne Twister, seeded in the same way.
    """
    words = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 2**32, length, np.uint32)
    order = np.arange(length)
    for i, word in enumerate(words):
        j = i + int(word) % (length - i)
        order[i], order[j] = order[j], order[i]
    return order


def hash_counters(*counters: int) -> int:
    """64 bits in which every counter counts (splitmix64, one round for each)."""
    state = 0
    for counter in counters:
        state = (state ^ (counter & _WORD)) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state
