"""`softmaxfree figures heatmap`: what one patch of an image attends to, head by head."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import patheffects
from PIL import Image
from torch import Tensor

from ...analysis.rows import chosen_layer
from ...errors import UserError
from ...imports import Names, import_modules
from ..pictures import COLORS, OTHER_COLOR
from .drawing import panels, save
from .subject import Subject, given_images, subjects

COLORMAP = "viridis"
"""Perceptually even, and legible for the colour-blind."""

PANEL = 1.6
"""Side of a panel, in inches."""

_WHOLE = (0, 1, 1, 0)
"""Left, right, bottom and top of an image, whose height counts downwards."""


class Heatmap(NamedTuple):
    """A row of a layer's attention matrix, of every head."""

    title: str
    """Of the model."""
    attention: str
    layer: str
    """Its name."""
    image: Tensor
    """(S, S, 3), as the model sees it, from 0 to 1."""
    grid: tuple[int, int]
    """(height, width) of the layer's queries."""
    query: tuple[int, int]
    """(row, column) of the patch on it."""
    weights: Tensor
    """(heads, H, W) of the keys: of all patches, or of a coarser grid."""

    @property
    def cross(self) -> tuple[float, float]:
        """(x, y) of the middle of the patch, in units of the image's side."""
        (row, column), (height, width) = self.query, self.grid
        return (column + 0.5) / width, (row + 0.5) / height

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each head and key."""
        names = ("model", "layer", "head", "query_row", "query_column", "row", "column", "weight")
        for (head, *key), weight in np.ndenumerate(self.weights.numpy()):
            cells = (self.title, self.layer, head, *self.query, *key, f"{weight:.8g}")
            yield dict(zip(names, cells))


def draw_heatmap(
    checkpoints: list[Path] | None = None,
    images: list[Path] | None = None,
    place: tuple[float, float] = (0.5, 0.5),
    layer: int | str = 0,
    size: int | None = None,
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw what one patch of an image attends to, for every head of several models.

    Each model has a block: the image with a cross at the patch, then the attention of every head.
    Only rows of the attention matrices are computed.

    Args:
        checkpoints: Trained weights, such as softpp_nano.cifar10 runs/mine; default: digit models
            that come with the package.
        images: Image files, a figure for each; default: a handwritten digit.
        place: Place of the patch, from [0,0] at the upper left to [1,1], the height first.
        layer: Layer to look at: a number in the order in which layers run, or a name.
        size: Side of images in pixels; default: as in training.
        out: Folder for heatmap-IMAGE.png, .svg and .csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    import_modules(modules)
    if any(not 0 <= fraction <= 1 for fraction in place):
        raise UserError(
            "--place must be two fractions of the image, from [0,0] at its upper left to [1,1] at "
            f"its lower right, the height first; got {list(place)}"
        )
    found = subjects(checkpoints, size)
    pictures = list(given_images(images, 4).items())
    taken: set[Path] = set()
    for name, image in pictures if images else pictures[3:]:  # a three has ink in its middle
        maps = [heatmap(subject, image, place, layer) for subject in found]
        stem = out / f"heatmap-{_safe(name)}"
        if stem in taken:
            stem = out / f"{stem.name}-{len(taken) + 1}"
        save(draw(maps, name), [row for one in maps for row in one.rows()], stem)
        taken.add(stem)


def heatmap(
    subject: Subject, image: Image.Image, place: tuple[float, float], layer: int | str
) -> Heatmap:
    """The attention of the patch at a place, without the whole attention matrix."""
    classifier = subject.classifier
    try:
        record = chosen_layer(subject.record(image), layer)
    except UserError as error:
        raise UserError(f"--layer of the model {subject.title}: {error}") from None
    token = record.token_at(*place)
    weights = record.on_grid(record.rows([token])[0].squeeze(-2))
    height, width = record.layout.size
    query = divmod(token - record.attention.prefix_tokens, width)
    seen = classifier.seen(classifier.tensor(image))
    about = subject.title, subject.attention, record.name
    return Heatmap(*about, seen, (height, width), query, weights)


def draw(maps: Sequence[Heatmap], name: str) -> Any:
    """A block of panels for each model: the image, then its heads."""
    most = 1 + max(len(one.weights) for one in maps)
    across = math.ceil(math.sqrt(most / len(maps)))  # so that it is about as wide as high
    down = math.ceil(most / across)
    figure, axes = panels(across * len(maps), down, PANEL, PANEL + 0.3)
    blocks = axes.reshape(down, len(maps), across).swapaxes(0, 1).reshape(len(maps), -1)
    for block, one in zip(blocks, maps):
        (image, *heads), spare = np.split(block, [1 + len(one.weights)])
        image.imshow(one.image, extent=_WHOLE)
        image.set_title(fill(one.title, 16), fontsize=12)
        for head, ax in enumerate(heads):
            _overlay(ax, one.image, one.weights[head])
            ax.set_title(f"head {head}", fontsize=10)
        for ax in (image, *heads):
            outline = patheffects.withStroke(linewidth=4, foreground="black")
            cross = {"marker": "+", "markersize": 12, "markeredgewidth": 2, "color": "white"}
            ax.plot(*one.cross, **cross, path_effects=[outline])
            ax.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(1, 0))
            for spine in ax.spines.values():
                spine.set(color=COLORS.get(one.attention, OTHER_COLOR), linewidth=2.5)
        for ax in spare:
            ax.remove()
    layers = ", ".join(dict.fromkeys(one.layer for one in maps))
    told = f"{name}: what the patch at the cross attends to, {layers}"
    figure.suptitle(fill(told, 14 * axes.shape[1]), fontsize=12)
    return figure


def _overlay(ax: Any, image: Tensor, weights: Tensor) -> None:
    """Draws weights (H, W) in colour on the image in grey, with a scale below."""
    # Greys from 1/4 to 3/4 leave the colours legible.
    ax.imshow(image.mean(-1), cmap="gray", vmin=-0.5, vmax=1.5, extent=_WHOLE)
    finite = weights[weights.isfinite()]
    lowest, highest = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 0.0)
    style: dict[str, Any] = {"cmap": COLORMAP, "alpha": 0.7, "interpolation": "nearest"}
    ax.imshow(weights, vmin=lowest, vmax=highest, extent=_WHOLE, **style)
    scale = ax.inset_axes((0, -0.1, 1, 0.05))
    scale.imshow(torch.linspace(0, 1, 256)[None], aspect="auto", extent=_WHOLE, **style)
    scale.set(xticks=[], yticks=[])
    some = "" if len(finite) == weights.numel() else " (not all finite)"
    for x, side, text in ((0, "left", _short(lowest)), (1, "right", _short(highest) + some)):
        scale.annotate(text, (x, 1), (0, -2), textcoords="offset points", ha=side, va="top")


def _short(weight: float) -> str:
    """Two digits, such as 0.012 or 3.4e-5."""
    small = 0 < abs(weight) < 1e-3
    text = f"{weight:.1e}".replace("e-0", "e-") if small else f"{weight:.2g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if weight < 0 else text


def _safe(name: str) -> str:
    """As part of a file's name: digits[12] becomes digits-12."""
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "image"
