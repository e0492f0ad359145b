"""`softmaxfree figures resolution`: accuracy against the size of test images.

SOFT sums over tokens, and a larger image has more of them. The strength of attention, drawn below
the accuracy, tells where accuracy is lost.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from ...analysis.diagnosis import MOST_GROWTH, diagnose
from ...analysis.hooks import evaluating
from ...data.sources import Source, open_source
from ...errors import UserError
from ...imports import Names, import_modules
from ...layers.attention import SoftmaxFreeAttention
from ..pictures import style
from ..results import table
from .drawing import panels, plt, save, ticker
from .subject import Subject, subjects

COMPARED = ("softpp", "soft", "softmax")
"""The digit models of the default figure."""

FACTORS = (1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 3, 4)
"""Default sides of the images, in units of the training size."""

DIAGNOSED = 4
"""The number of images that the strength of attention is measured on."""

_CHUNK = 64
"""Images that are read at a time, and scored by all models at all sizes."""

_PIXELS = 8 * 224**2
"""Pixels of a batch."""


class Growth(NamedTuple):
    """|A Z A| of the layers in units of that at the training size."""

    mean: float
    """Geometric, over the layers."""
    lowest: float
    highest: float


class Point(NamedTuple):
    """One model at one size."""

    title: str
    """Of the model."""
    size: int
    """Side of the images, in pixels."""
    accuracy: float
    """From 0 to 1."""
    images: int
    growth: Growth | None
    """Of SOFT and SOFT++ only."""

    def row(self) -> dict[str, Any]:
        mean, lowest, highest = ("", "", "") if self.growth is None else self.growth
        return {
            "model": self.title,
            "size": self.size,
            "accuracy": self.accuracy,
            "images": self.images,
            "growth": mean,
            "growth_lowest": lowest,
            "growth_highest": highest,
        }


def draw_resolution(
    checkpoints: list[Path] | None = None,
    sizes: list[int] | None = None,
    root: str | None = None,
    split: str = "val",
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw accuracy against the size of test images, with the strength of attention below it.

    The strength is |A Z A| of SOFT and SOFT++, see `diagnose`, in units of that at the training
    size: mean and range over the layers. Prints the numbers too. The default takes 2 minutes.

    Args:
        checkpoints: Trained weights, such as [softpp_nano.cifar10,runs/mine]; default: digit models
            with SOFT++, SOFT and softmax that come with the package.
        sizes: Sides of images in pixels; default: half of to four times the training size.
        root: Folder with a folder of images for each class; default: the held-out digits.
        split: Part of it to test on.
        out: Folder for resolution.png, resolution.svg and resolution.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    import_modules(modules)
    found = subjects(checkpoints, embedded=COMPARED)
    source = _labelled_images(root, split)
    classes = [_class_numbers(subject, source) for subject in found]
    chosen = [_sizes(subject, sizes) for subject in found]
    accuracies, images = accuracy(found, chosen, source, classes)
    some = _some(source)
    points = []
    cases = [(i, size) for i, of_subject in enumerate(chosen) for size in of_subject]
    for i, size in tqdm(cases, desc="strength of attention", unit="size", leave=False):
        strength = growth(found[i], size, some)
        points.append(Point(found[i].title, size, accuracies[i, size], images, strength))
    save(drawn(found, points), [point.row() for point in points], out / "resolution")
    print(_table(points))


def accuracy(
    found: Sequence[Subject],
    sizes: Sequence[Sequence[int]],
    source: Source,
    classes: Sequence[Sequence[int]],
) -> tuple[dict[tuple[int, int], float], int]:
    """Accuracies by (number of the model, size), and the number of images.

    Images that cannot be read are named and left out.

    Args:
        found: Models.
        sizes: For each model, the sides of the images.
        source: Labelled images.
        classes: For each model, its class numbers of the source's classes.
    """
    right = {(i, size): 0 for i, of_subject in enumerate(sizes) for size in of_subject}
    scored = 0
    with tqdm(total=len(source), desc="accuracy", unit="image", leave=False) as bar:
        for start in range(0, len(source), _CHUNK):
            indices = range(start, min(start + _CHUNK, len(source)))
            loaded = list(_readable(source, indices))
            for i, size in right if loaded else ():
                targets = [classes[i][target] for _, target in loaded]
                right[i, size] += _hits(found[i], size, [image for image, _ in loaded], targets)
            scored += len(loaded)
            bar.update(len(indices))
    if not scored:
        raise UserError(f"none of the {len(source)} images can be read; check the data")
    return {case: hits / scored for case, hits in right.items()}, scored


def growth(subject: Subject, size: int, images: Sequence[Image.Image]) -> Growth | None:
    """How strong softmax-free attention is at a size, in units of the training size's."""
    model = subject.classifier.model
    if not any(isinstance(part, SoftmaxFreeAttention) for part in model.modules()):
        return None
    tensors = torch.cat([subject.classifier.tensor(image, size) for image in images])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what it warns of is drawn
        found = diagnose(model, tensors, subject.classifier.size)
    layers = torch.tensor([layer.growth for layer in found.layers], dtype=torch.float64)
    return Growth(layers.log().mean().exp().item(), layers.min().item(), layers.max().item())


def drawn(found: Sequence[Subject], points: Sequence[Point]) -> Any:
    """Accuracy and, of softmax-free attention, its strength below."""
    measured = any(point.growth is not None for point in points)
    with plt.rc_context({"font.size": 11}):
        figure, axes = panels(1, 2 if measured else 1, 6.4, 3.0)
        upper, lower = axes[0, 0], axes[-1, 0]
        for ax in axes.flat:
            _axis_of_sizes(ax, found, points)
        _axis_of_accuracy(upper, found)
        if measured:
            _axis_of_strength(lower)
        lower.set_xlabel("side of the test images (pixels)")
        for subject in found:
            line = _style(subject, found)
            own = [point for point in points if point.title == subject.title]
            sizes = [point.size for point in own]
            upper.plot(sizes, [100 * p.accuracy for p in own], label=subject.title, **line)
            strengths = [point.growth for point in own if point.growth is not None]
            if strengths:
                lower.plot(sizes, [strength.mean for strength in strengths], **line)
                lowest, highest = zip(*(strength[1:] for strength in strengths))
                lower.fill_between(sizes, lowest, highest, color=line["color"], alpha=0.2, lw=0)
        figure.legend(loc="outside upper center", ncols=min(len(found), 4), frameon=False)
    return figure


def _axis_of_sizes(ax: Any, found: Sequence[Subject], points: Sequence[Point]) -> None:
    sizes = sorted({point.size for point in points})
    ax.set_xscale("log")
    ax.minorticks_off()
    ax.set_xticks(sizes, [str(size) for size in sizes], rotation=45 if len(sizes) > 10 else 0)
    ax.grid(alpha=0.3)
    for trained in sorted({subject.classifier.size for subject in found}):
        ax.axvline(trained, color="black", linewidth=1, linestyle=":")
        _label(ax, f" trained at {trained}", (trained, 0), ("data", "axes fraction"), "left")


def _axis_of_accuracy(ax: Any, found: Sequence[Subject]) -> None:
    ax.set(ylabel="accuracy (%)", ylim=(0, 105))
    for chance in {100 / len(subject.classifier.classes) for subject in found}:
        ax.axhline(chance, color="black", linewidth=1, linestyle=(0, (6, 4)), alpha=0.6)
        _label(ax, "chance", (0.65, chance), ("axes fraction", "data"), "left")


def _axis_of_strength(ax: Any) -> None:
    ax.set(yscale="log", ylabel="strength of attention\n(times that in training)")
    ax.yaxis.set(major_locator=ticker.LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}")
    ax.yaxis.set_minor_locator(ticker.NullLocator())
    ax.axhspan(1 / MOST_GROWTH, MOST_GROWTH, color="black", alpha=0.08, lw=0)
    told = f"within a factor of {MOST_GROWTH:g}"
    _label(ax, told, (1, 1 / MOST_GROWTH), ("axes fraction", "data"), "right")


def _label(
    ax: Any, text: str, place: tuple[float, float], units: tuple[str, str], side: str
) -> None:
    shift = (-4 if side == "right" else 0, 3)
    ax.annotate(
        text, place, shift, xycoords=units, textcoords="offset points", ha=side, fontsize=10
    )


def _style(subject: Subject, found: Sequence[Subject]) -> dict[str, Any]:
    """The method's style; several models of one method differ in their lines."""
    same = [other.title for other in found if other.attention == subject.attention]
    line = ("-", "--", "-.", ":")[same.index(subject.title) % 4]
    return style(subject.attention) | {"linestyle": line}


def _labelled_images(root: str | None, split: str) -> Source:
    try:
        source = open_source("digits" if root is None else "", root, split)
    except UserError as error:
        raise UserError(str(error).replace("--data.root", "--root")) from None
    assert isinstance(source, Source)  # streams have names
    return source


def _class_numbers(subject: Subject, source: Source) -> list[int]:
    """The model's number of each class of the data, found by name."""
    known = subject.classifier.classes
    if source.classes is None:
        raise UserError(
            "the data do not tell what their classes are called; give --root a folder with a "
            "folder of images for each class"
        )
    unknown = [name for name in source.classes if name not in known]
    if unknown:
        raise UserError(
            f"{subject.title} knows no class {_listed(unknown)} of the data, only "
            f"{_listed(known)}; give --root a folder of which every folder is named after one"
        )
    return [known.index(name) for name in source.classes]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} others" if len(names) > 3 else shown


def _sizes(subject: Subject, sizes: Sequence[int] | None) -> list[int]:
    """The sizes given, or the default ones that the model accepts, in order."""
    if sizes is not None:
        if not sizes or min(sizes) < 1:
            raise UserError(f"--sizes must be sides of 1 pixel or more, got {list(sizes)}")
        for size in sizes:
            reason = _refusal(subject, size)
            if reason is not None:
                raise UserError(
                    f"{subject.title} takes no images of {size} x {size} pixels ({reason}); "
                    f"leave {size} out of --sizes"
                )
        return sorted(set(sizes))
    trained = subject.classifier.size
    usual = {max(1, round(factor * trained)) for factor in FACTORS}
    refused = {size for size in usual if _refusal(subject, size) is not None}
    if refused:
        left_out = ", ".join(map(str, sorted(refused)))
        print(f"left out of {subject.title}, which does not take them: {left_out} pixels")
    return sorted(usual - refused)


def _refusal(subject: Subject, size: int) -> str | None:
    """Why a model rejects images of a size, or None."""
    model = subject.classifier.model
    try:
        with evaluating(model):
            model(torch.zeros(1, 3, size, size))
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error).split("\n")[0].rstrip(".") or type(error).__name__
    return None


def _readable(source: Source, indices: Sequence[int]) -> Iterator[tuple[Image.Image, int]]:
    """Yields images with their classes, and prints the names of those that cannot be read."""
    for index in indices:
        try:
            yield source.load(index)
        except Exception as error:  # whatever a broken file makes the decoders raise
            reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
            tqdm.write(f"skipped {source.describe(index)}, which cannot be read: {reason}")


def _some(source: Source) -> list[Image.Image]:
    """A few images from all over the data."""
    found: list[Image.Image] = []
    step = max(1, len(source) // DIAGNOSED)
    for index in (i for first in range(step) for i in range(first, len(source), step)):
        try:
            found.append(source.load(index)[0])
        except Exception:  # it has been named before
            continue
        if len(found) == DIAGNOSED:
            break
    return found


def _hits(
    subject: Subject, size: int, images: Sequence[Image.Image], targets: Sequence[int]
) -> int:
    """The number of images whose class the model finds; logits must be finite to count."""
    classifier, right = subject.classifier, 0
    at_once = max(1, _PIXELS // size**2)
    with evaluating(classifier.model):
        for start in range(0, len(images), at_once):
            part = slice(start, start + at_once)
            tensors = torch.cat([classifier.tensor(image, size) for image in images[part]])
            logits: Tensor = classifier.model(tensors)
            correct = logits.argmax(1) == torch.tensor(targets[part])
            right += int((correct & logits.isfinite().all(1)).sum())
    return right


def _table(points: Sequence[Point]) -> str:
    rows = [
        [
            point.title,
            str(point.size),
            f"{100 * point.accuracy:.2f} %",
            str(point.images),
            "" if point.growth is None else f"{point.growth.mean:.2f}",
            "" if point.growth is None else f"{point.growth.highest:.2f}",
        ]
        for point in points
    ]
    return table(["model", "side", "accuracy", "images", "growth", "in a layer"], rows)
