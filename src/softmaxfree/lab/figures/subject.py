"""The trained models and the images of a figure: given by the user, or the package's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from ...analysis.attention_record import AttentionRecord
from ...analysis.hooks import evaluating, recorded_attention
from ...data.image_files import read_image
from ...data.paths import shown
from ...data.sources import Digits
from ...errors import UserError, check_size
from ...imports import needs
from ...layers.attention import SoftmaxFreeAttention
from ...layers.multihead import MultiHeadAttention
from ...layers.registry import ATTENTIONS, attention_class
from ...models.weights import PACKAGED, find_weights
from ..bench.contestants import find

with needs("train", "a figure"):
    from ...tasks.predict import Classifier


class Subject(NamedTuple):
    """A trained model with its title and its attention."""

    title: str
    """Such as SOFT++."""
    attention: str
    """Such as softpp, for the colour."""
    classifier: Classifier

    def record(self, image: Image.Image, size: int | None = None) -> dict[str, AttentionRecord]:
        """The attention of every layer in a forward pass, by the layers' names."""
        with evaluating(self.classifier.model), recorded_attention(self.classifier.model) as layers:
            self.classifier.model(self.classifier.tensor(image, size))
        return layers


DIGITS = ("softpp", "soft", "softmax", "performer", "nystromformer")
"""Attentions of the models of digits; the wheel carries the first, a clone all of them."""


def subjects(
    checkpoints: Sequence[str | Path] | None,
    size: int | None = None,
    embedded: Sequence[str] = DIGITS,
) -> list[Subject]:
    """Classifiers by the names of their weights, or models of digits that come with the package.

    Args:
        checkpoints: As `find_weights` takes them.
        size: Side of images in pixels; default: as in training.
        embedded: Attentions of models of digits, for when no checkpoints are given; those that are
            not here are left out.
    """
    check_size(size)
    if checkpoints is None:
        here = [name for name in (f"digits-{one}" for one in embedded) if name in PACKAGED]
        return [_subject(Classifier(find_weights(name), size)) for name in here]
    if not checkpoints:
        raise UserError(
            "--checkpoints is empty; name files, or leave it out for the embedded models"
        )
    found = []
    for path in checkpoints:
        found.append(_subject(Classifier(find_weights(path), size)))
    return _told_apart(found, checkpoints)


def _subject(classifier: Classifier) -> Subject:
    name = attention_name(classifier)
    if name == "softmax":
        return Subject("softmax", name, classifier)
    return Subject(find(name).title if name in ATTENTIONS else name, name, classifier)


def _told_apart(found: list[Subject], checkpoints: Sequence[str | Path]) -> list[Subject]:
    """Adds the runs' names, or numbers, to titles that several models have."""
    titles = [subject.title for subject in found]
    for label in (lambda i: _short(checkpoints[i]), lambda i: str(i + 1)):
        common = {title for title in titles if titles.count(title) > 1}
        titles = [f"{t} ({label(i)})" if t in common else t for i, t in enumerate(titles)]
    return [subject._replace(title=title) for subject, title in zip(found, titles)]


def _short(source: str | Path) -> str:
    """The name of weights, or of the run's folder that a checkpoint is in."""
    path = Path(source)
    return path.absolute().parent.name if path.suffix == ".ckpt" else path.name


def attention_name(classifier: Classifier) -> str:
    """The name of the attention of a model's first layer."""
    parts = classifier.model.modules()
    first = next((part for part in parts if isinstance(part, MultiHeadAttention)), None)
    if first is None:
        raise UserError(
            f"{type(classifier.model).__name__} has no attention of this package to look into; "
            "give the checkpoint of one of its backbones, or of a model trained with "
            "--model.attention"
        )
    if isinstance(first, SoftmaxFreeAttention):
        return "softx" if first.rows else "softpp" if first.normalize else "soft"
    return next((name for name in ATTENTIONS if attention_class(name) is type(first)), "other")


def given_images(paths: Sequence[Path] | None, count: int) -> dict[str, Image.Image]:
    """Images by name: those of files, or held-out digits, first one of each class.

    The name of a second file of one name gets a number.
    """
    if paths is not None:
        if not paths:
            raise UserError("--images is empty; name files, or leave it out for digits")
        found: dict[str, Image.Image] = {}
        for number, path in enumerate(paths, 1):
            stem = shown(path.stem)
            name = stem if stem not in found else f"{stem}-{number}"
            found[name] = read_image(path)
        return found
    digits = Digits("val")
    by_class: dict[int, list[int]] = {}
    for index in range(len(digits)):
        by_class.setdefault(digits.load(index)[1], []).append(index)
    order = [by_class[digit][turn] for turn in range(count // 10 + 1) for digit in sorted(by_class)]
    return {digits.describe(index): digits.load(index)[0] for index in order[:count]}
