"""`softmaxfree figures resolution`: accuracy against the size of test images.

SOFT sums over tokens, and a larger image has more of them. The strength of attention, drawn below
the accuracy, tells where accuracy is lost.
"""

import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from .drawing import panels, plt, save
from .subject import Subject, subjects

COMPARED = ("softpp", "soft", "softmax")
"""The digit models of the default figure."""

FACTORS = (1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 3, 4)
"""Default sides of the images, in units of the training size."""

DIAGNOSED = 4
"""The number of images that the strength of attention is measured on."""

_PIXELS = 8 * 224**2
"""Pixels of a batch."""

Row = dict[str, Any]
"""One model at one size: model, size, accuracy (from 0 to 1), images, growth of attention."""


def draw_resolution(
    checkpoints: list[Path] | None = None,
    sizes: list[int] | None = None,
    root: str | None = None,
    split: str = "val",
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw accuracy against the size of test images, with the strength of attention below it.

    The strength is |A Z A| of SOFT and SOFT++, which others do not have, see `diagnose`, in units
    of that at the training size: mean and range over the layers. Prints the numbers too. The
    default takes 2 minutes.

    Args:
        checkpoints: Trained weights, such as softpp_nano.cifar10 runs/mine; default: digit models
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
    rows, some = scored(found, [_sizes(subject, sizes) for subject in found], source)
    by_title = {subject.title: subject for subject in found}
    for row in tqdm(rows, desc="strength of attention", unit="size", leave=False):
        row |= growth(by_title[row["model"]], row["size"], some)
    save(drawn(found, rows), rows, out / "resolution")
    print(_table(rows))


def scored(
    found: Sequence[Subject], sizes: Sequence[Sequence[int]], source: Source
) -> tuple[list[Row], list[Image.Image]]:
    """Accuracies of models, and a few images from all over the data.

    Images that cannot be read are named and left out.

    Args:
        found: Models.
        sizes: For each model, the sides of the images.
        source: Labelled images.
    """
    classes = [_class_numbers(subject, source) for subject in found]
    right = {(i, size): 0 for i, of_subject in enumerate(sizes) for size in of_subject}
    at_once = max(1, _PIXELS // max(size for _, size in right) ** 2)
    some: list[Image.Image] = []
    images = 0
    for start in tqdm(range(0, len(source), at_once), "accuracy", unit="batch", leave=False):
        numbers = range(start, min(start + at_once, len(source)))
        loaded = list(_readable(source, numbers))
        for i, size in right if loaded else ():
            targets = torch.tensor([classes[i][target] for _, _, target in loaded])
            right[i, size] += _hits(found[i], size, [image for _, image, _ in loaded], targets)
        step = -(-len(source) // DIAGNOSED)
        some += [image for number, image, _ in loaded if not (some and number % step)]
        images += len(loaded)
    if not images:
        raise UserError(f"none of the {len(source)} images can be read; check the data")
    rows = [
        {"model": found[i].title, "size": size, "accuracy": hits / images, "images": images}
        for (i, size), hits in right.items()
    ]
    return rows, some


def _readable(source: Source, numbers: Sequence[int]) -> Iterator[tuple[int, Image.Image, int]]:
    """Yields numbers, images and classes, and prints the names of those that cannot be read."""
    for number in numbers:
        try:
            yield number, *source.load(number)
        except Exception as error:  # whatever a broken file makes the decoders raise
            reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
            tqdm.write(f"skipped {source.describe(number)}, which cannot be read: {reason}")


def _hits(subject: Subject, size: int, images: Sequence[Image.Image], targets: Tensor) -> int:
    """The number of images whose class the model finds; logits must be finite to count."""
    classifier = subject.classifier
    with evaluating(classifier.model):
        logits = classifier.model(torch.cat([classifier.tensor(image, size) for image in images]))
    return int(((logits.argmax(1) == targets) & logits.isfinite().all(1)).sum())


def growth(subject: Subject, size: int, images: Sequence[Image.Image]) -> Row:
    """How strong attention is at a size, in units of that at the training size.

    The (geometric) mean over the layers, the lowest and the highest; empty without SOFT or SOFT++.
    """
    model = subject.classifier.model
    parts = (part for part in model.modules() if isinstance(part, SoftmaxFreeAttention))
    if all(part.rows for part in parts):
        return {}
    tensors = torch.cat([subject.classifier.tensor(image, size) for image in images])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what it warns of is drawn
        layers = diagnose(model, tensors, subject.classifier.size).layers
    found = [layer.growth for layer in layers if layer.growth is not None]
    mean = statistics.geometric_mean(found)
    return {"growth": mean, "growth_lowest": min(found), "growth_highest": max(found)}


def drawn(found: Sequence[Subject], rows: Sequence[Row]) -> Any:
    """Accuracy and, of softmax-free attention, its strength below."""
    measured = any("growth" in row for row in rows)
    with plt.rc_context({"font.size": 11}):
        figure, axes = panels(1, 2 if measured else 1, 6.4, 3.0)
        upper, lower = axes[0, 0], axes[-1, 0]
        _axis_of_accuracy(upper, found)
        if measured:
            _axis_of_strength(lower)
        for subject in found:
            line = _style(subject, found)
            own = [row for row in rows if row["model"] == subject.title]
            sizes = [row["size"] for row in own]
            upper.plot(sizes, [100 * row["accuracy"] for row in own], label=subject.title, **line)
            if "growth" in own[0]:
                lower.plot(sizes, [row["growth"] for row in own], **line)
                ends = ([row[f"growth_{end}"] for row in own] for end in ("lowest", "highest"))
                lower.fill_between(sizes, *ends, color=line["color"], alpha=0.2, lw=0)
        sides = sorted({row["size"] for row in rows})
        for ax in axes.flat:
            ax.set_xscale("log")
            ax.minorticks_off()
            ax.set_xticks(sides, map(str, sides), rotation=45 if len(sides) > 10 else 0)
            ax.grid(alpha=0.3)
            for trained in sorted({subject.classifier.size for subject in found}):
                ax.axvline(trained, color="black", linewidth=1, linestyle=":")
                _label(ax, f" trained at {trained}", (trained, 0), ("data", "axes fraction"))
        lower.set_xlabel("side of the test images (pixels)")
        figure.legend(loc="outside upper center", ncols=min(len(found), 4), frameon=False)
    return figure


def _axis_of_accuracy(ax: Any, found: Sequence[Subject]) -> None:
    ax.set(ylabel="accuracy (%)", ylim=(0, 105))
    for chance in {100 / len(subject.classifier.classes) for subject in found}:
        ax.axhline(chance, color="black", linewidth=1, linestyle=(0, (6, 4)), alpha=0.6)
        _label(ax, "chance", (0.65, chance), ("axes fraction", "data"))


def _axis_of_strength(ax: Any) -> None:
    ax.set(ylabel="strength of attention\n(times that in training)")
    ax.set_yscale("log", subs=[2, 5])
    ax.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    ax.axhspan(1 / MOST_GROWTH, MOST_GROWTH, color="black", alpha=0.08, lw=0)
    told = f"within a factor of {MOST_GROWTH:g}"
    _label(ax, told, (0.99, 1 / MOST_GROWTH), ("axes fraction", "data"), ha="right")


def _label(ax: Any, text: str, place: tuple[float, float], units: Any, ha: str = "left") -> None:
    above = {"xytext": (0, 3), "textcoords": "offset points"}
    ax.annotate(text, place, xycoords=units, **above, ha=ha, fontsize=10)


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
    known, asked = subject.classifier.classes, source.classes or []
    for name in asked:
        if name not in known:
            raise UserError(
                f"{subject.title} knows no class {name!r} of the data; give --root a folder of "
                f"which every folder is named after one of its classes, such as {known[0]!r}"
            )
    return [known.index(name) for name in asked]


def _sizes(subject: Subject, sizes: Sequence[int] | None) -> list[int]:
    """The sizes given, or the default ones that the model accepts, in order."""
    if sizes is not None and min(sizes, default=0) < 1:
        raise UserError(f"--sizes must be sides of 1 pixel or more, got {list(sizes)}")
    usual = [max(1, round(factor * subject.classifier.size)) for factor in FACTORS]
    wanted = sorted({*(sizes or usual)})
    refused = {size: reason for size in wanted if (reason := _refusal(subject, size))}
    if refused and sizes is not None:
        size, reason = min(refused.items())
        raise UserError(
            f"{subject.title} takes no images of {size} x {size} pixels ({reason}); leave {size} "
            "out of --sizes"
        )
    if refused:
        left_out = ", ".join(map(str, refused))
        print(f"left out of {subject.title}, which does not take them: {left_out} pixels")
    return [size for size in wanted if size not in refused]


def _refusal(subject: Subject, size: int) -> str:
    """Why a model rejects images of a size; empty if it does not."""
    model = subject.classifier.model
    try:
        with evaluating(model):
            model(torch.zeros(1, 3, size, size))
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error).split("\n")[0].rstrip(".") or type(error).__name__
    return ""


def _table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["model"],
            str(row["size"]),
            f"{100 * row['accuracy']:.2f} %",
            str(row["images"]),
            *(f"{row[name]:.2f}" if name in row else "" for name in ("growth", "growth_highest")),
        ]
        for row in rows
    ]
    return table(["model", "side", "accuracy", "images", "growth", "in a layer"], lines)
