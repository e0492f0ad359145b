"""The content of the page: models, images and places in, pictures and words out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from cachetools import LRUCache, cached
from PIL import Image
from torch import Tensor

from ...analysis.diagnosis import diagnose
from ...analysis.factors import Factors
from ...layers.attention import SoftmaxFreeAttention
from ..figures.subject import Subject, given_images, subjects
from .attended import (
    STEPS,
    Place,
    WhatIf,
    attended,
    convergence_of,
    factors_of,
    inverts,
    landmark_boxes,
    supposed,
)
from .drawing import atlas_picture, heat_picture, image_picture, landmark_picture
from .looks import Look, Photo, distinct_bytes, look, look_key, photo

MOST_BYTES = 300_000_000
"""Limit for all forward passes that are kept, and for all factors. softpp_tiny takes 20 MB for an
image of 224 pixels."""

LARGEST_SIDE = 512
"""Limit for images as models see them, unless a model was trained at more."""

EXAMPLES = 10
"""The number of digits among the examples, one of each."""


TRAINED = "as trained"
NORMALIZE = {TRAINED: None, "SOFT++": True, "SOFT": False}


class Asked(NamedTuple):
    """What a visitor asks for: the values of the controls, in their order."""

    photo: str | None = None
    """Its key; None after a session has ended."""
    place: Place = (0.5, 0.5)
    layer: float = 1
    """In the order in which layers run, from 1; the last one if there are fewer."""
    head: float = 1
    """From 1; the last one if there are fewer."""
    times: float = 1
    """The resolution, in units of the training size."""
    inverse: str = TRAINED
    """`TRAINED`, or a method."""
    iters: float = 0
    """0 for the trained number."""
    normalize: str = TRAINED
    """One of `NORMALIZE`."""
    left: str = ""
    right: str = ""

    @property
    def models(self) -> tuple[str, str]:
        return self.left, self.right

    @property
    def what_if(self) -> WhatIf:
        inverse = None if self.inverse == TRAINED else self.inverse
        steps = min(int(self.iters), STEPS[-1])
        return WhatIf(inverse, None if steps < 1 else steps, NORMALIZE[self.normalize])


class Maps(NamedTuple):
    """What a patch attends to, in one model."""

    image: Image.Image
    """As the model sees it."""
    heat: Image.Image
    """The chosen layer and head."""
    landmarks: Image.Image | None
    """Where its landmarks are."""
    atlas: Image.Image
    """All layers and heads."""
    caption: str
    """Names the layer and the head, and describes the row."""


class View:
    """Pictures of models' attention. Threads may share it.

    A click on a patch does not run a model again: forward passes and factors are kept, those that
    were used last.

    Args:
        models: By name.
        photos: The examples, by name.
    """

    def __init__(self, models: Mapping[str, Subject], photos: Mapping[str, Photo]) -> None:
        self.models, self.photos = dict(models), dict(photos)
        # One pass of a model at a time: timm's models remember the grid of their image.
        self._passes = {subject: Lock() for subject in models.values()}
        looks: LRUCache[object, Look] = LRUCache(MOST_BYTES, lambda found: found.nbytes)
        factors: LRUCache[object, Factors | None] = LRUCache(
            MOST_BYTES, lambda found: distinct_bytes(found or ())
        )
        self._look = cached(looks, look_key, Lock())(look)
        self._factors = cached(factors, lambda look, *rest: (look.key, *rest), Lock())(factors_of)

    def look(self, model: str, photo: Photo, times: float = 1) -> Look:
        """The forward pass of an image at a multiple of the training size."""
        subject = self.models[model]
        with self._passes[subject]:
            return self._look(subject, photo, side_of(subject, times))

    def heads(self, model: str) -> list[int]:
        """The number of heads of each layer."""
        first = next(iter(self.photos.values()))
        return [record.q.shape[1] for record in self.look(model, first).layers]

    def maps(self, look: Look, asked: Asked) -> Maps:
        """Rows of the attention of all layers and heads."""
        layer, head = _chosen(look, asked)
        found = [
            attended(record, self._factors(look, number, asked.what_if), asked.place)
            for number, record in enumerate(look.layers)
        ]
        seen, drawn = look.seen, None
        (maps, cell, nearness), boxes = found[layer], landmark_boxes(look.layers[layer])
        if nearness is not None:
            drawn = landmark_picture(seen, boxes, nearness[head], cell)
        return Maps(
            image_picture(seen, asked.place),
            heat_picture(seen, maps[head], cell),
            drawn,
            atlas_picture(found, (layer, head)),
            _caption(look, layer, head, maps, asked.what_if),
        )

    def convergence(self, look: Look, asked: Asked) -> list[dict[str, Any]] | None:
        """Residuals of the chosen layer's inverse; None if it inverts nothing."""
        layer, head = _chosen(look, asked)
        factors = self._factors(look, layer, asked.what_if)
        if factors is None or factors.A is None:
            return None
        return convergence_of(supposed(look.layers[layer], asked.what_if), factors, head)

    def prediction(self, look: Look) -> tuple[dict[str, float], str]:
        """Probabilities, and a caption: the size of the image, warnings of what that size does.

        It does not depend on what-if settings.
        """
        classifier, warnings = look.subject.classifier, tuple[str, ...]()
        trained = classifier.size
        softmax_free = any(isinstance(x.attention, SoftmaxFreeAttention) for x in look.layers)
        if softmax_free and look.side != trained:
            with self._passes[look.subject]:
                warnings = diagnose(classifier.model, look.tensor, trained).warnings
        size = f"{look.side} x {look.side} pixels, trained at {trained} x {trained}."
        named = dict(zip(classifier.classes, look.probabilities.tolist()))
        words = [size, *(f"Warning: {text}." for text in warnings), f"The model {classifier.knows}"]
        return named, " ".join(words)


def side_of(subject: Subject, times: float) -> int:
    """A multiple of the training size: divisible by 32 (by 16 for small images), and at most
    `LARGEST_SIDE` or the training size."""
    own = subject.classifier.size
    if times == 1:
        return own
    step = 32 if own >= 64 else 16
    return min(max(round(own * times / step), 1) * step, max(LARGEST_SIDE // step * step, own))


def available_models(checkpoints: Sequence[Path] | None) -> dict[str, Subject]:
    """The models of digits, and those of runs' checkpoints, by distinct names."""
    found = {f"{subject.title} (digits)": subject for subject in subjects(None)}
    for path in checkpoints or []:
        (subject,) = subjects([path])
        found[f"{subject.title} ({path})"] = subject
    return found


def example_photos() -> dict[str, Photo]:
    """Held-out digits, and the photographs that come with scikit-learn."""
    images = dict(given_images(None, EXAMPLES))
    try:
        from sklearn.datasets import load_sample_images

        sample = load_sample_images()
        for name, pixels in zip(sample["filenames"], sample["images"]):
            images[Path(name).stem] = Image.fromarray(pixels)
    except (ImportError, OSError):  # a package without its pictures
        pass
    return {name: photo(name, image) for name, image in images.items()}


def inside(number: float, count: int) -> int:
    """The index of a number that counts from 1; the first or the last if it is beyond."""
    return min(max(int(number), 1), count) - 1


def _chosen(look: Look, asked: Asked) -> tuple[int, int]:
    """The chosen layer and head."""
    layer = inside(asked.layer, len(look.layers))
    return layer, inside(asked.head, look.layers[layer].q.shape[1])


def _caption(look: Look, layer: int, head: int, maps: Tensor, what_if: WhatIf) -> str:
    record = supposed(look.layers[layer], what_if)
    attention, weights = record.attention, maps[head]
    height, width = record.layout.size
    text = (
        f"Layer {layer + 1} of {len(look.layers)}, head {head + 1} of {len(maps)}, "
        f"{height} x {width} tokens. Weights sum to {weights.sum():.3g}, from "
        f"{weights.min():.2g} to {weights.max():.2g}."
    )
    if isinstance(attention, SoftmaxFreeAttention):
        inverse = attention.inverse if inverts(record) else "none"
        text += f" {len(landmark_boxes(record))} landmarks, inverse: {inverse}."
        if str(what_if) and inverts(record):
            return f"WHAT IF {what_if}. {text}"
    else:
        text += " No landmarks."
    if str(what_if):
        text += " What-if does not apply: there is nothing to invert."
    return text
