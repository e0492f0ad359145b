"""Small untrained models, and images of noise."""

import pytest
import torch
from PIL import Image
from time_page import untrained

from softmaxfree.lab.explore.looks import Photo, photo
from softmaxfree.lab.explore.view import View
from softmaxfree.lab.figures.subject import Subject

ATTENTIONS = ("softpp", "soft", "softmax", "softx")


def noise(seed: int, width: int = 48, height: int = 40) -> Photo:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return photo(f"noise {seed}", Image.fromarray(pixels.numpy()))


@pytest.fixture(scope="session")
def models() -> dict[str, Subject]:
    return {name: untrained("softpp_nano", 32, name) for name in ATTENTIONS}


@pytest.fixture
def view(models: dict[str, Subject]) -> View:
    """Nothing is kept in it yet."""
    return View(models, {"noise": noise(0)})
