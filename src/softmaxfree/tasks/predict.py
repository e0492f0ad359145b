"""`softmaxfree predict`: classes, objects or labelled pixels of images, by trained weights."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from ..data.image_files import check_resized
from ..data.transforms import evaluation_transform
from ..environment import chosen_device
from ..errors import UserError, check_size, visible
from ..files import check_folder_of
from ..imports import MODULES, Names, import_modules
from ..models.weights import Weights, find_weights
from .predict_files import TABLES, Entries, Pictures, Reader, find_images, table
from .predict_labels import Labeller
from .predict_objects import ObjectFinder

MOST_AT_ONCE, PIXELS_AT_ONCE = 64, 2**22
"""The most images, and the most pixels, that a classifier is given at a time."""
MOST_NAMED = 12
"""The most classes that are listed when a model's are named."""
_COLUMNS = {
    "Classification": ("class", "index", "probability"),
    "Detection": ("class", "index", "score", "x", "y", "width", "height"),
    "Segmentation": ("class", "share"),
}
"""What is told of each entry in CSV."""


class Classifier:
    """A trained classifier, and the preparation of its images.

    Args:
        weights: A classifier's, see `softmaxfree.models.weights`.
        size: Side of images in pixels; as in training if not given.
    """

    def __init__(self, weights: Weights, size: int | None = None) -> None:
        images = weights.preparation
        self.model = weights.build()
        self.classes = list(weights.classes)
        self.size = size or images.size
        self.mean, self.std = torch.tensor(images.mean), torch.tensor(images.std)
        self._crop_pct, self._interpolation = images.crop_pct, images.interpolation

    def tensor(self, image: Image.Image, size: int | None = None) -> Tensor:
        """An image in RGB -> (1, 3, S, S), as the model takes it.

        Args:
            image: In RGB.
            size: The side S; the classifier's own if not given.
        """
        size = size or self.size
        check_resized(image, int(size / self._crop_pct))
        transform = evaluation_transform(
            size,
            crop_pct=self._crop_pct,
            interpolation=self._interpolation,
            mean=tuple(self.mean.tolist()),
            std=tuple(self.std.tolist()),
        )
        ready: Tensor = transform(image)
        return ready.unsqueeze(0)

    def seen(self, tensor: Tensor) -> Tensor:
        """The result of `tensor` as colours from 0 to 1: (1, 3, S, S) -> (S, S, 3)."""
        return (tensor[0].permute(1, 2, 0) * self.std + self.mean).clamp(0, 1)

    @property
    def knows(self) -> str:
        """What the model can say, as the end of a sentence that begins with its name."""
        some = ", ".join(visible(name) for name in self.classes[:MOST_NAMED])
        rest = len(self.classes) - MOST_NAMED
        return (
            f"knows {len(self.classes)} classes and nothing else: {some}"
            f"{f' and {rest} more' if rest > 0 else ''}. Probabilities compare these classes; they "
            "do not tell whether an image shows any of them."
        )

    @torch.inference_mode()
    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities (B, classes) of prepared images (B, 3, S, S)."""
        logits: Tensor = self.model(images.to(next(self.model.parameters()).device))
        return logits.softmax(1).cpu()

    def top(self, images: Tensor, count: int) -> list[Entries]:
        """The most probable classes of each prepared image, in descending order."""
        found = self.probabilities(images).topk(min(count, len(self.classes)))
        return [
            [
                {"class": self.classes[number], "index": number, "probability": value}
                for number, value in zip(numbers, values)
            ]
            for values, numbers in zip(found.values.tolist(), found.indices.tolist())
        ]


def predict(arguments: list[str]) -> None:
    """Parses the command line of `softmaxfree predict`."""
    parser = ArgumentParser(
        prog="softmaxfree predict",
        exit_on_error=False,
        allow_abbrev=False,
        description="Say what is on images, with trained weights; draw what a detector finds. An "
        "image that cannot be read is reported, and the others go on.",
    )
    # Without a type: jsonargparse requires UTF-8 of typed values, and file names may be anything.
    parser.add_argument(
        "images",
        nargs="+",
        help="Image files, folders of them, or patterns such as 'photos/**/*.jpg'.",
    )
    parser.add_argument(
        "--checkpoint",
        type=str,
        required=True,
        help="Trained weights: softpp_nano.cifar10, a run's folder or checkpoint, a file.",
    )
    parser.add_argument("--top", type=int | None, help="Number of classes to show; 5.")
    parser.add_argument("--threshold", type=float | None, help="Lowest score of an object; 0.5.")
    parser.add_argument(
        "--size", type=int | None, help="Side of images in pixels; as in training if not given."
    )
    parser.add_argument(
        "--out",
        type=Path | None,
        help="Folder for pictures of what is found, by default predictions; or a .jsonl or .csv "
        "file to write what is found to.",
    )
    parser.add_argument(
        "--device",
        type=Literal["cpu", "cuda"] | None,
        help="Device to compute on. A GPU if there is one.",
    )
    parser.add_argument("--modules", type=Names, help=MODULES)
    given = parser.parse_args(arguments)
    import_modules(given.modules)
    options = {name: given[name] for name in ("top", "size", "threshold", "out", "device")}
    run(given.images, given.checkpoint, **options)


def run(
    images: Sequence[str | Path],
    checkpoint: str | Path,
    top: int | None = None,
    size: int | None = None,
    threshold: float | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> None:
    """Says what is on images: classes, objects or labels, as the checkpoint was trained.

    Args:
        images: Files, folders and patterns.
        checkpoint: Trained weights, as `find_weights` takes them.
        top: Number of classes to show for each image.
        size: Side, for a detector the shorter one, to resize to; as in training if not given.
        threshold: Lowest score of an object that is shown.
        out: A .jsonl or .csv file for what is found, or a folder for pictures of it.
        device: Device to compute on; a GPU if there is one.
    """
    check_size(size)
    if top is not None and top < 1:
        raise UserError(f"--top must be at least 1, got {top}")
    if threshold is not None and not 0 <= threshold <= 1:
        raise UserError(f"--threshold must be from 0 to 1, got {threshold}")
    device = chosen_device(device)
    is_table = _is_table(out)
    read = Reader(find_images(images))
    weights = find_weights(checkpoint)
    if weights.task == "Detection":
        _refuse(weights, "objects", {"--top": top})
        finder = ObjectFinder(weights, size)
        finder.task.to(device)
        found = _objects(read, finder, 0.5 if threshold is None else threshold)
    elif weights.task == "Segmentation":
        _refuse(weights, "classes of pixels", {"--top": top, "--threshold": threshold})
        labeller = Labeller(weights, size)
        labeller.task.to(device)
        found = _labels(read, labeller)
    else:
        _refuse(weights, "classes", {"--threshold": threshold})
        if out and not is_table:
            raise UserError(
                f"{weights.source} finds classes and draws no pictures: give --out a file that "
                f"ends in {' or '.join(TABLES)}, got {out}"
            )
        classifier = Classifier(weights, size)
        classifier.model.to(device)
        found = _classes(read(classifier.tensor), classifier, 5 if top is None else top)
        print(f"{visible(weights.source)} {classifier.knows}", file=sys.stderr)
    draws = weights.task in ("Detection", "Segmentation") and not is_table
    pictures = Pictures(out or Path("predictions")) if draws else None
    target = pictures.folder / "found.jsonl" if pictures else out
    with table(target, _COLUMNS[weights.task or "Classification"]) as write:
        for path, entries, drawn in found:
            write(path, entries)
            note = pictures.write(path, drawn) if pictures else ""
            if not is_table:
                tqdm.write("\n".join([visible(path) + note, *map(_line, entries)]))
    if target:
        print(f"written: {visible(target)}")
    read.finish()


def _is_table(out: Path | None) -> bool:
    """Whether --out is a file for what is found, not a folder for pictures."""
    if out is None or out.is_dir() or not out.suffix:
        return False
    if out.suffix not in TABLES:
        raise UserError(f"--out must be a folder, or end in {' or '.join(TABLES)}, got {out}")
    check_folder_of(out)
    return True


def _refuse(weights: Weights, what: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{weights.source} finds {what}, and takes no {name}: leave it out")


Found = Iterator[tuple[Path, Entries, dict[str, Image.Image]]]
"""Files, what is found on them, and pictures of it by what is added to their names."""


def _classes(images: Iterator[tuple[Path, Tensor]], classifier: Classifier, top: int) -> Found:
    batch = max(1, min(MOST_AT_ONCE, PIXELS_AT_ONCE // classifier.size**2))
    while several := list(islice(images, batch)):
        paths, tensors = zip(*several)
        for path, entries in zip(paths, classifier.top(torch.cat(tensors), top)):
            yield path, entries, {}


def _objects(read: Reader, finder: ObjectFinder, threshold: float) -> Found:
    for path, (drawn, objects) in read(lambda image: finder.find(image, threshold)):
        yield path, objects, {"": drawn}


def _labels(read: Reader, labeller: Labeller) -> Found:
    for path, (image, labels) in read(lambda image: (image, labeller.label(image))):
        shares = [{"class": name, "share": x} for name, x in labeller.shares(labels).items()]
        yield path, shares, {"": labeller.overlay(image, labels), "-labels": labels}


def _line(entry: dict[str, Any]) -> str:
    """An entry as text."""
    value = next(entry[name] for name in ("probability", "score", "share") if name in entry)
    box = ""
    if "bbox" in entry:
        x, y, width, height = entry["bbox"]
        box = f"  {width:.0f} x {height:.0f} pixels at {x:.0f}, {y:.0f}"
    return f"  {value * 100:6.2f} %  {visible(entry['class']):{16 if box else 0}}{box}"
