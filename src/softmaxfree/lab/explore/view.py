"""What the page shows, without the page: models, images and places in, pictures and words out."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from ..figures.subject import Subject, given_images, subjects
from .attended import (
    AS_TRAINED,
    Attended,
    Convergence,
    Place,
    Rows,
    WhatIf,
    convergence_of,
    is_softmax_free,
    landmark_grid,
    resolution_warning,
    supposed,
)
from .drawing import (
    atlas_picture,
    convergence_picture,
    heat_picture,
    image_picture,
    landmark_picture,
)
from .looks import Kept, Look, Looks, Photo, photo

LARGEST_SIDE = 512
"""Of images as models see them, unless they were trained at more."""

EXAMPLES = 10
"""Of the digits: one of each."""


class Choice(NamedTuple):
    """What is looked at."""

    layer: int = 0
    """In the order in which layers run, from 0; the last if there are fewer."""
    head: int = 0
    """From 0; the last if there are fewer."""
    place: Place = (0.5, 0.5)
    what_if: WhatIf = AS_TRAINED


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
    """Which layer and head it is, and what its row is like."""


class Prediction(NamedTuple):
    """What a model says of an image, whatever the place."""

    probabilities: dict[str, float]
    caption: str
    """At which size, and whether to believe it."""


class View:
    """Pictures of models' attention. Threads may share it: nothing in it is anybody's own.

    Args:
        models: By name.
        photos: To begin with, by name.
    """

    def __init__(self, models: Mapping[str, Subject], photos: Mapping[str, Photo]) -> None:
        self.models, self.photos = dict(models), dict(photos)
        self._looks, self._rows = Looks(self.models.values()), Rows()
        self._convergence: Kept[Convergence] = Kept()

    def look(self, model: str, photo: Photo, times: float = 1) -> Look:
        """The forward pass of an image at so many times the size of training."""
        subject = self.models[model]
        return self._looks.at(subject, photo, side_of(subject, times))

    def layers(self, model: str) -> list[int]:
        """How many heads each layer has."""
        first = next(iter(self.photos.values()))
        return [record.q.shape[1] for record in self.look(model, first).layers]

    def maps(self, look: Look, choice: Choice) -> Maps:
        """What a click asks for: rows of all layers and heads."""
        layer, head = _inside(look, choice)
        attended = [
            self._rows.at(look, number, choice.place, choice.what_if)
            for number in range(len(look.layers))
        ]
        chosen, record = attended[layer], look.layers[layer]
        grid, drawn = landmark_grid(record), None
        if grid is not None:
            assert chosen.nearness is not None
            prefix = record.attention.prefix_tokens
            nearness = chosen.nearness[head, prefix : prefix + grid.num_landmarks]
            drawn = landmark_picture(look.seen, grid, nearness, chosen)
        return Maps(
            image_picture(look.seen, choice.place),
            heat_picture(look.seen, chosen.maps[head], chosen),
            drawn,
            atlas_picture(attended, (layer, head)),
            _caption(look, layer, head, chosen, choice.what_if),
        )

    def convergence(self, look: Look, choice: Choice) -> Image.Image | None:
        """How fast the chosen layer's landmark matrix is inverted; None if it has none."""
        layer, head = _inside(look, choice)
        if not is_softmax_free(look.layers[layer]):
            return None
        key: Hashable = (look.key, layer, head, choice.what_if)
        found = None if look.key is None else self._convergence.get(key)
        if found is None:
            record = supposed(look.layers[layer], choice.what_if)
            factors = self._rows.factors(look, layer, choice.what_if)
            found = convergence_of(record, factors, head)
            self._convergence.put(key, found, 1000)
        return convergence_picture(found, str(choice.what_if))

    def prediction(self, look: Look, trained: Look) -> Prediction:
        """The model's own, whatever is asked what-if.

        Args:
            look: At the size that is chosen.
            trained: The same image at the size of training.
        """
        classifier = look.subject.classifier
        named = dict(zip(classifier.classes, look.probabilities.tolist()))
        caption = f"{look.side} x {look.side} pixels, trained at {trained.side} x {trained.side}."
        warning = "" if look is trained else resolution_warning(self._rows, look, trained)
        return Prediction(named, f"{caption} {warning}".strip())


def side_of(subject: Subject, times: float) -> int:
    """So many times the side of training: a multiple of 32 (of 16 for small images), not more than
    `LARGEST_SIDE` or the side of training."""
    own = subject.classifier.size
    if times == 1:
        return own
    step = 32 if own >= 64 else 16
    return min(max(round(own * times / step), 1) * step, max(LARGEST_SIDE // step * step, own))


def available_models(ckpts: Sequence[Path] | None) -> dict[str, Subject]:
    """The embedded models, and those of runs' checkpoints, by names that differ."""
    found = {f"{subject.title} (digits)": subject for subject in subjects(None)}
    for path in ckpts or []:
        (subject,) = subjects([path])
        found[f"{subject.title} ({path})"] = subject
    return found


def example_photos() -> dict[str, Photo]:
    """Held-out digits, and the photographs that come with scikit-learn."""
    images = dict(given_images(None, EXAMPLES))
    try:
        from sklearn.datasets import load_sample_images

        sample: list[tuple[str, Image.Image]] = [
            (Path(name).stem, Image.fromarray(pixels))
            for name, pixels in zip(*[load_sample_images()[key] for key in ("filenames", "images")])
        ]
        images.update(sample)
    except (ImportError, OSError):  # a package without its pictures
        pass
    return {name: photo(name, image) for name, image in images.items()}


def _inside(look: Look, choice: Choice) -> tuple[int, int]:
    """The layer and the head, of those that the model has."""
    layer = min(choice.layer, len(look.layers) - 1)
    return layer, min(choice.head, look.layers[layer].q.shape[1] - 1)


def _caption(look: Look, layer: int, head: int, attended: Attended, what_if: WhatIf) -> str:
    record, weights = look.layers[layer], attended.maps[head]
    height, width = record.layout.size
    text = (
        f"Layer {layer + 1} of {len(look.layers)}, head {head + 1} of {len(attended.maps)}, "
        f"{height} x {width} tokens. Weights sum to {weights.sum():.3g}, from "
        f"{weights.min():.2g} to {weights.max():.2g}."
    )
    grid = landmark_grid(record)
    if grid is not None:
        text += f" {grid.num_landmarks} landmarks."
        return f"WHAT IF {what_if}. {text}" if str(what_if) else text
    text += " No landmarks."
    if str(what_if):
        text += " What-if does not apply: there is nothing to invert."
    return text
