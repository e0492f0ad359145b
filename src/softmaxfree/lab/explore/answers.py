"""From the values of the page's controls to the values of its components."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...errors import UserError
from .attended import STEPS, WhatIf
from .drawing import SIDE
from .looks import Look, photo
from .uploads import Inbox, Photos
from .view import Choice, Maps, View

T = TypeVar("T")

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
        found = self._of_both(asked, lambda look: self.view.maps(look, asked.choice))
        images = [maps.image for maps in found if isinstance(maps, Maps)]
        drawn = [
            part
            for maps in found
            for part in (maps[1:] if isinstance(maps, Maps) else (None, None, None, f"{maps}."))
        ]
        return [images[0] if images else self.photos.get(asked.photo).image, *drawn]

    def curves(self, *values: Any) -> list[list[dict[str, Any]] | None]:
        """The convergence of both models."""
        asked = Asked(*values)
        found = self._of_both(asked, lambda look: self.view.convergence(look, asked.choice))
        return [None if isinstance(rows, str) else rows for rows in found]

    def predictions(self, *values: Any) -> list[Any]:
        """Probabilities and caption of both models; a caption begins with the model's name."""
        asked = Asked(*values)
        drawn = list[Any]()
        for name, found in zip(asked.models, self._of_both(asked, self.view.prediction)):
            drawn += (None, "") if isinstance(found, str) else (found[0], f"{name}: {found[1]}")
        return drawn

    def bounds(self, *values: Any) -> tuple[int, int]:
        """The layers of the deeper model, and the heads of the wider one in this layer."""
        asked = Asked(*values)
        heads = [self.view.heads(model) for model in asked.models]
        layer = asked.choice.layer
        wide = max(counts[min(layer, len(counts) - 1)] for counts in heads)
        return max(map(len, heads)), wide

    def _of_both(self, asked: Asked, answer: Callable[[Look], T]) -> list[T | str]:
        """What both models answer, or why one cannot."""
        photo, found = self.photos.get(asked.photo), list[T | str]()
        for model in asked.models:
            try:
                found.append(answer(self.view.look(model, photo, min(asked.times, MOST_TIMES))))
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
