"""Forward passes that are kept: a click on a patch does not run a model again."""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from PIL import Image
from torch import Tensor

from ...analysis.attention_record import AttentionRecord
from ...analysis.hooks import evaluating, recorded_attention
from ...errors import UserError
from ..figures.subject import Subject

MOST_BYTES = 300_000_000
"""Of all that is kept of one kind. softpp_tiny takes 20 MB for an image of 224 pixels."""

Value = TypeVar("Value")


class Photo(NamedTuple):
    """An image with its name and what tells it from others."""

    name: str
    image: Image.Image
    """In RGB."""
    digest: str


def photo(name: str, image: Image.Image) -> Photo:
    return Photo(
        name, image, hashlib.sha256(image.tobytes() + repr(image.size).encode()).hexdigest()
    )


@dataclass(frozen=True, eq=False)
class Look:
    """What a model has made of an image at one size."""

    subject: Subject
    key: Hashable
    seen: Tensor
    """(S, S, 3), the image as the model sees it, from 0 to 1."""
    probabilities: Tensor
    """(classes)."""
    layers: tuple[AttentionRecord, ...]
    """In the order in which they ran."""

    @property
    def side(self) -> int:
        return self.seen.shape[0]


class Kept(Generic[Value]):
    """Values by key; those that were not asked for longest go first. Threads may share it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """A value that takes so many bytes; one that is too large by itself is not kept."""
        with self._lock:
            self._values[key] = (value, size)
            while sum(size for _, size in self._values.values()) > self.most_bytes:
                self._values.popitem(last=False)

    def __len__(self) -> int:
        return len(self._values)


class Looks:
    """`look`, once for each model, image and size as long as there is room to keep it."""

    def __init__(self, subjects: Iterable[Subject]) -> None:
        self._kept: Kept[Look] = Kept()
        # One pass of a model at a time: timm's models remember the grid of the image they are at.
        self._locks = {id(subject.classifier): Lock() for subject in subjects}

    def at(self, subject: Subject, photo: Photo, side: int) -> Look:
        key = (id(subject.classifier), photo.digest, side)
        with self._locks[id(subject.classifier)]:
            found = self._kept.get(key)
            if found is None:
                found = look(subject, photo, side, key)
                self._kept.put(key, found, _bytes_of(found.layers))
        return found


def look(subject: Subject, photo: Photo, side: int, key: Hashable = None) -> Look:
    """Runs a model on an image of side x side pixels.

    Raises:
        ValueError: If the model does not take images of this size.
    """
    classifier = subject.classifier
    tensor = classifier.tensor(photo.image, side)
    try:
        with evaluating(classifier.model), recorded_attention(classifier.model) as layers:
            logits: Tensor = classifier.model(tensor)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UserError(
            f"{subject.title} takes no images of {side} x {side} pixels ({reason}): choose another "
            "resolution"
        ) from error
    return Look(subject, key, classifier.seen(tensor), logits.softmax(1)[0], tuple(layers.values()))


def _bytes_of(layers: Iterable[AttentionRecord]) -> int:
    return sum(distinct_bytes((record.q, record.k, record.v)) for record in layers)


def distinct_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of all tensors, one that is there twice counted once."""
    found = {id(tensor): tensor for tensor in tensors if tensor is not None}
    return sum(tensor.nbytes for tensor in found.values())
