"""Pictures of attention that are drawn fast enough to answer a click."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..figures.heatmap import COLORMAP
from .attended import Attended, Box

SIDE = 400
"""Side of the picture of an image, in pixels."""

FORMAT = "jpeg"
"""The format of pictures for the browser; PNG and WebP take 20 times as long to write."""

LINE, CHOSEN, NUMBERS = "white", "#D55E00", "#808080"
"""Numbers can be read on a light page and on a dark one."""

_COLORS = mpl.colormaps[COLORMAP].with_extremes(bad="#808080")
_FONT: Any = ImageFont.load_default(12)
_LEFT, _TOP, _GAP = 34, 18, 2
"""Pixels of the atlas: for the numbers of layers and of heads, and between maps."""


def image_picture(seen: Tensor, place: tuple[float, float]) -> Image.Image:
    """The image (S, S, 3) with a cross at a place."""
    picture = _photograph(seen)
    _cross(picture, *place)
    return picture


def heat_picture(seen: Tensor, weights: Tensor, cell: Box) -> Image.Image:
    """Weights (H, W) in colour on the image in grey, the patch framed, a cross in it."""
    picture = Image.blend(_grey(seen), _enlarged(_coloured(weights), SIDE), 0.7)
    _frame(picture, cell)
    return picture


def landmark_picture(
    seen: Tensor, boxes: Sequence[Box], nearness: Tensor, cell: Box
) -> Image.Image:
    """Landmarks on the image (S, S, 3), coloured by their nearness (m) to the patch."""
    grey = _grey(seen)
    colored = grey.copy()
    for box, color in zip(boxes, _coloured(nearness.unsqueeze(0))[0]):
        ImageDraw.Draw(colored).rectangle(_pixels(box), tuple(color))
    picture = Image.blend(grey, colored, 0.55)
    for box in boxes:
        ImageDraw.Draw(picture).rectangle(_pixels(box), outline=LINE)
    _frame(picture, cell)
    return picture


def atlas_picture(layers: Sequence[Attended], chosen: tuple[int, int]) -> Image.Image:
    """Every layer from top to bottom, every head from left to right, the chosen one framed.

    The colours of each map range from its lowest weight to its highest. What is beside the maps is
    transparent, for dark pages.
    """
    most = max(len(attended.maps) for attended in layers)
    side = min(max((560 - _LEFT) // most - _GAP, 32), 88)
    step = side + _GAP
    picture = Image.new("RGBA", (_LEFT + step * most, _TOP + step * len(layers)))
    draw = ImageDraw.Draw(picture)
    for row, attended in enumerate(layers):
        draw.text((4, _TOP + row * step + side // 2 - 7), f"{row + 1}", NUMBERS, _FONT)
        for column, weights in enumerate(attended.maps):
            place = _LEFT + column * step, _TOP + row * step
            picture.paste(_enlarged(_coloured(weights), side), place)
    for column in range(most):
        draw.text((_LEFT + column * step + side // 2 - 4, 2), f"{column + 1}", NUMBERS, _FONT)
    top, left = _TOP + chosen[0] * step, _LEFT + chosen[1] * step
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline=CHOSEN, width=3)
    return picture


def _coloured(weights: Tensor) -> np.ndarray:
    """(H, W) -> (H, W, 3): colours from the lowest to the highest weight, grey if not finite."""
    values = weights.detach().double().numpy()
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    scaled = np.where(finite, (values - low) / max(high - low, 1e-300), np.nan)
    return _COLORS(scaled, bytes=True)[..., :3]


def _enlarged(pixels: np.ndarray, side: int) -> Image.Image:
    """(H, W, 3) -> side x side pixels, every entry a rectangle."""
    return Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)


def _photograph(seen: Tensor) -> Image.Image:
    return _enlarged((seen.numpy() * 255).round().astype(np.uint8), SIDE)


def _grey(seen: Tensor) -> Image.Image:
    return _photograph(seen).convert("L").convert("RGB")


def _pixels(box: Box) -> tuple[float, ...]:
    top, left, bottom, right = box
    return left * SIDE, top * SIDE, right * SIDE, bottom * SIDE


def _frame(picture: Image.Image, cell: Box) -> None:
    draw = ImageDraw.Draw(picture)
    x0, y0, x1, y1 = _pixels(cell)
    draw.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline="black", width=1)
    draw.rectangle((x0, y0, x1, y1), outline="white", width=2)
    _cross(picture, (cell[0] + cell[2]) / 2, (cell[1] + cell[3]) / 2)


def _cross(picture: Image.Image, down: float, across: float) -> None:
    """White on black, visible on any colour."""
    x, y = across * SIDE, down * SIDE
    draw = ImageDraw.Draw(picture)
    for color, width, arm in (("black", 5, 9), ("white", 2, 8)):
        draw.line((x - arm, y, x + arm, y), color, width)
        draw.line((x, y - arm, x, y + arm), color, width)
