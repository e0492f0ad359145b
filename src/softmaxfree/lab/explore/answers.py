"""From the values of the page's controls to the values of its components."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...errors import UserError
from .drawing import SIDE
from .looks import Look, photo
from .uploads import Inbox, Photos
from .view import Asked, Maps, View, inside

T = TypeVar("T")

MOST_TIMES = 4.0
"""The highest resolution in units of the training size."""


class Answers:
    """Lists of values for the components; a sentence if a model cannot be shown.

    All raise `EndedError` if the chosen image is no longer known.
    """

    def __init__(self, view: View, photos: Photos) -> None:
        self.view, self.photos = view, photos

    def maps(self, *values: Any) -> list[Any]:
        """The image; then heat map, landmarks, atlas and caption of both models."""
        asked = Asked(*values)
        found = self._of_both(asked, lambda look: self.view.maps(look, asked))
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
        found = self._of_both(asked, lambda look: self.view.convergence(look, asked))
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
        wide = max(counts[inside(asked.layer, len(counts))] for counts in heads)
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
