"""Times a click on the page of `softmaxfree explore`: `python scripts/time_page.py`, a minute."""

import io
import statistics
import time
from typing import Any

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from softmaxfree.lab.explore.drawing import FORMAT
from softmaxfree.lab.explore.looks import photo
from softmaxfree.lab.explore.view import Asked, View
from softmaxfree.lab.figures.subject import Subject
from softmaxfree.models.build import BackboneConfig, build_model
from softmaxfree.models.weights import Weights
from softmaxfree.tasks.predict import Classifier

CLICKS = 20


def untrained(
    backbone: str,
    size: int,
    attention: str | None = None,
    options: dict[str, Any] | None = None,
) -> Subject:
    """A model with random weights: what it attends to means nothing, its time does."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "backbone": backbone,
        "num_classes": 1000,
        "attention": attention,
        "options": options,
    }
    model = build_model(BackboneConfig(backbone, attention, options=options), 1000)
    told = {
        "hyper_parameters": arguments,
        "images": {
            "classes": None,
            "size": size,
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "crop_pct": 0.875,
            "interpolation": "bicubic",
        },
    }
    weights = Weights(backbone, model.state_dict(), "Classification", told)
    return Subject(backbone, attention or "softpp", Classifier(weights))


def click_seconds(view: View, models: tuple[str, ...], clicks: int = CLICKS) -> list[float]:
    """From a click to all pictures of the models, encoded as the browser gets them."""
    image = next(iter(view.photos.values()))
    for model in models:
        view.look(model, image)  # done when the image was chosen
    seconds = []
    for number in range(clicks):
        asked = Asked(place=(number / clicks, 0.5))
        start = time.perf_counter()
        for model in models:
            for picture in view.maps(view.look(model, image), asked)[:4]:
                if isinstance(picture, Image.Image):
                    picture.save(io.BytesIO(), FORMAT)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    torch.manual_seed(0)
    pixels = (torch.rand(256, 256, 3) * 255).byte().numpy()
    shown = {"noise": photo("noise", Image.fromarray(pixels))}
    models = {name: untrained("softpp_tiny", 224) for name in ("left", "right")}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        view = View(models, shown)
        start = time.perf_counter()
        view.look("left", shown["noise"])
        print(f"{threads} threads: choosing an image {time.perf_counter() - start:.2f} s a model")
        for title, chosen in (("one model", ("left",)), ("two models", ("left", "right"))):
            first, *others = click_seconds(view, chosen)
            print(
                f"{threads} threads: a click, {title}: first {first:.3f} s, then "
                f"{statistics.median(others):.3f} s (at most {max(others):.3f} s)"
            )


if __name__ == "__main__":
    main()
