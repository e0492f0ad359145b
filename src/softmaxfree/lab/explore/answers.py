"""From the values of the page's controls to the values of its components."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import UserError
from .attended import STEPS, WhatIf
from .drawing import SIDE
from .looks import Look, photo
from .uploads import Inbox, Photos
from .view import Choice, View

TRAINED = "as trained"
NORMALIZE = {TRAINED: None, "SOFT++": True, "SOFT": False}
MOST_TIMES = 4.0
"""The highest resolution in units of the training size."""


class Asked(NamedTuple):
    """The values of the controls, in their order."""

    photo: str | None
    """Its key; None after a session has ended."""
    place: tuple[float, float]
    layer: float
    """From 1."""
    head: float
    """From 1."""
    times: float
    inverse: str
    """`TRAINED`, or a method."""
    iters: float
    """0 for the trained number."""
    normalize: str
    """One of `NORMALIZE`."""
    left: str
    right: str

    @property
    def models(self) -> tuple[str, str]:
        return self.left, self.right

    @property
    def choice(self) -> Choice:
        """The choice, with values from the browser brought within bounds."""
        steps = min(int(self.iters), STEPS[-1])
        what_if = WhatIf(
            None if self.inverse == TRAINED else self.inverse,
            None if steps < 1 else steps,
            NORMALIZE[self.normalize],
        )
        layer, head = (max(int(number), 1) - 1 for number in (self.layer, self.head))
        return Choice(layer, head, self.place, what_if)


class Answers:
    """Lists of values for the components; a sentence if a model cannot be shown.

    All raise `EndedError` if the chosen image is no longer known.
    """

    def __init__(self, view: View, photos: Photos) -> None:
        self.view, self.photos = view, photos

    def maps(self, *values: Any) -> list[Any]:
        """The image; then heat map, landmarks, atlas and caption of both models."""
        asked = Asked(*values)
        image, drawn = None, list[Any]()
        for look in self._looks(asked):
            try:
                if isinstance(look, str):
                    raise UserError(look)
                found = self.view.maps(look, asked.choice)
            except UserError as error:
                drawn += [None, None, None, f"{error}."]
                continue
            image = image or found.image
            drawn += [found.heat, found.landmarks, found.atlas, found.caption]
        return [image or self.photos.get(asked.photo).image, *drawn]

    def curves(self, *values: Any) -> list[Any]:
        """The convergence of both models."""
        asked = Asked(*values)
        return [
            None if isinstance(look, str) else self.view.convergence(look, asked.choice)
            for look in self._looks(asked)
        ]

    def predictions(self, *values: Any) -> list[Any]:
        """Probabilities and caption of both models."""
        asked = Asked(*values)
        drawn = list[Any]()
        for look, trained in zip(self._looks(asked), self._looks(asked._replace(times=1))):
            if isinstance(look, str) or isinstance(trained, str):
                drawn += [None, ""]
            else:
                drawn += self.view.prediction(look, trained)
        return drawn

    def bounds(self, *values: Any) -> tuple[int, int]:
        """The layers of the deeper model, and the heads of the wider one in this layer."""
        asked = Asked(*values)
        heads = [self.view.heads(model) for model in asked.models]
        layer = asked.choice.layer
        wide = max(counts[min(layer, len(counts) - 1)] for counts in heads)
        return max(map(len, heads)), wide

    def _looks(self, asked: Asked) -> list[Look | str]:
        found: list[Look | str] = []
        photo = self.photos.get(asked.photo)
        for model in asked.models:
            try:
                found.append(self.view.look(model, photo, min(asked.times, MOST_TIMES)))
            except UserError as error:
                found.append(str(error))
        return found


def place_of(pixel: Sequence[float]) -> tuple[float, float]:
    """The place of the image, the height first, at the pixel (x, y) of its picture."""
    x, y = (min(max(float(number) / SIDE, 0.0), 1.0) for number in pixel)
    return y, x


def taken(path: str, before: str | None, inbox: Inbox, photos: Photos) -> tuple[str | None, str]:
    """The key of an uploaded image; or the key before, and why the upload is refused."""
    try:
        return photos.keep(photo(Path(path).name, inbox.take(path))), ""
    except UserError as error:
        return before, f"Refused: {error}."
