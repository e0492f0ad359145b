"""What the contestants of an experiment cost, measured in one run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.cost import cost, image_bytes
from ..measure import time_interleaved
from .contestants import CONTESTANTS, SIDE

BATCH = 32
"""Images of the steps that are timed."""


def costs(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parameters, multiply-adds, memory an image and images a second in training, by contestant.

    Steps of all contestants are timed in turns, and the best of each counts.
    """
    images, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.zeros(BATCH, dtype=torch.long)
    models = {name: CONTESTANTS[name].build() for name in names}
    steps: dict[str, Callable[[], None]] = {
        name: partial(training_step, model, images, labels) for name, model in models.items()
    }
    times = time_interleaved(steps, repeats=8)
    found = {}
    for name, model in models.items():
        counted = cost(model, 3, SIDE, SIDE)
        found[name] = {
            "parameters": counted.parameters,
            "multiply_adds": counted.multiply_adds,
            "image_bytes": image_bytes(model, 3, SIDE, SIDE),
            "images_per_second": BATCH / times[name].best,
        }
    return found


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Forward and backward pass."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
