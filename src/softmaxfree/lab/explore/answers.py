"""What the page's controls ask for and what they get: lists of values, one for each component."""

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
"""The highest resolution in units of training's."""


class Asked(NamedTuple):
    """What the controls say, in their order."""

    photo: str | None
    """Its key; None where a session has ended."""
    place: tuple[float, float]
    layer: float
    """From 1."""
    head: float
    """From 1."""
    times: float
    inverse: str
    """`TRAINED`, or a method."""
    iters: float
    """0 for as many as trained with."""
    normalize: str
    """One of `NORMALIZE`."""
    left: str
    right: str

    @property
    def models(self) -> tuple[str, str]:
        return self.left, self.right

    @property
    def choice(self) -> Choice:
        """Whatever comes from a browser brought within bounds."""
        steps = min(int(self.iters), STEPS[-1])
        what_if = WhatIf(
            None if self.inverse == TRAINED else self.inverse,
            None if steps < 1 else steps,
            NORMALIZE[self.normalize],
        )
        row, column = self.place
        return Choice(
            max(int(self.layer), 1) - 1, max(int(self.head), 1) - 1, (row, column), what_if
        )


class Answers:
    """A list for each thing that can be asked; a sentence where a model cannot be shown.

    Where the image that was chosen is no longer known, an `EndedError` says so.
    """

    def __init__(self, view: View, photos: Photos) -> None:
        self.view, self.photos = view, photos

    def maps(self, *values: Any) -> list[Any]:
        """The image; heat map, landmarks, atlas and caption of both models."""
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
        """How many layers the deeper model has, and how many heads the wider one in this layer."""
        asked = Asked(*values)
        heads = [self.view.layers(model) for model in asked.models]
        layers = max(len(counts) for counts in heads)
        layer = asked.choice.layer
        return layers, max(counts[min(layer, len(counts) - 1)] for counts in heads)

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
    """(x, y) on a picture of the image -> its place, the height first."""
    x, y = (min(max(float(number) / SIDE, 0.0), 1.0) for number in pixel)
    return y, x


def taken(path: str, before: str | None, inbox: Inbox, photos: Photos) -> tuple[str | None, str]:
    """The key of the image in a file that was sent; or the one before, and why."""
    try:
        return photos.keep(photo(Path(path).name, inbox.take(path))), ""
    except UserError as error:
        return before, f"Refused: {error}."
