"""Forward passes of images, with the queries, keys and values of every layer."""

import hashlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from ...analysis.attention_record import AttentionRecord
from ...analysis.hooks import evaluating, recorded_attention
from ...errors import UserError
from ..figures.subject import Subject


class Photo(NamedTuple):
    """An image with its name."""

    name: str
    image: Image.Image
    """In RGB."""
    digest: str
    """A hash of the pixels."""


def photo(name: str, image: Image.Image) -> Photo:
    pixels = image.tobytes() + repr(image.size).encode()
    return Photo(name, image, hashlib.sha256(pixels).hexdigest())


@dataclass(frozen=True, eq=False)
class Look:
    """What a model made of an image at one size."""

    subject: Subject
    key: Hashable
    """Model, image and size."""
    tensor: Tensor
    """(1, 3, S, S), the image as the model takes it."""
    probabilities: Tensor
    """(classes)."""
    layers: tuple[AttentionRecord, ...]
    """In the order in which they ran."""

    @property
    def side(self) -> int:
        return self.tensor.shape[-1]

    @property
    def seen(self) -> Tensor:
        """(S, S, 3), the image as the model sees it, from 0 to 1."""
        return self.subject.classifier.seen(self.tensor)

    @property
    def nbytes(self) -> int:
        return sum(distinct_bytes((record.q, record.k, record.v)) for record in self.layers)


def look_key(subject: Subject, photo: Photo, side: int) -> Hashable:
    return subject, photo.digest, side


def look(subject: Subject, photo: Photo, side: int) -> Look:
    """Runs a model on an image of side x side pixels.

    Raises:
        UserError: If the model rejects images of this size.
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
    key = look_key(subject, photo, side)
    return Look(subject, key, tensor, logits.softmax(1)[0], tuple(layers.values()))


def distinct_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The size of all tensors, each counted once."""
    found = {id(tensor): tensor for tensor in tensors if tensor is not None}
    return sum(tensor.nbytes for tensor in found.values())
