"""Pictures of attention that are drawn fast enough to answer a click."""

import io
import math
from collections.abc import Sequence
from threading import Lock
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..figures.heatmap import COLORMAP
from ..figures.newton import METHODS
from .attended import STEPS, Attended, Convergence, LandmarkGrid

SIDE = 400
"""Side of the picture of an image, in pixels."""

FORMAT = "jpeg"
"""The format of pictures for the browser; PNG and WebP take 20 times as long to write."""

LINE, CHOSEN = (255, 255, 255), (213, 94, 0)

_COLORS = mpl.colormaps[COLORMAP].with_extremes(bad="#808080")
_FONT: Any = ImageFont.load_default(12)
_MARGIN, _GAP = 34, 2
"""Pixels of the atlas: for the numbers of layers, and between maps."""

_LOWEST, _HIGHEST = -9.0, 0.7
"""Exponents of residuals at the ends of the axis."""

_matplotlib = Lock()
"""matplotlib is not thread-safe."""


def image_picture(seen: Tensor, place: tuple[float, float]) -> Image.Image:
    """The image (S, S, 3) with a cross at a place."""
    picture = Image.fromarray(_enlarged(_to_bytes(seen), SIDE))
    _cross(picture, place)
    return picture


def heat_picture(seen: Tensor, weights: Tensor, attended: Attended) -> Image.Image:
    """Weights (H, W) in colour on the image in grey, the patch framed, a cross in it."""
    colors = Image.fromarray(_enlarged(_coloured(weights), SIDE))
    picture = Image.blend(_grey(seen), colors, 0.7)
    _frame(picture, attended.cell)
    return picture


def landmark_picture(
    seen: Tensor, grid: LandmarkGrid, nearness: Tensor, attended: Attended
) -> Image.Image:
    """Landmarks on the image (S, S, 3), coloured by their nearness (m) to the patch."""
    colors = _coloured(nearness.unsqueeze(0))[0]
    picture = _grey(seen)
    layer = picture.copy()
    draw = ImageDraw.Draw(layer)
    for (y, x), color in zip(grid.points, colors):
        draw.rectangle(_box(y - 0.012, x - 0.012, y + 0.012, x + 0.012), tuple(color), LINE)
    windows = (
        (top, left, bottom, right)
        for top, bottom in zip(grid.rows, grid.rows[1:])
        for left, right in zip(grid.columns, grid.columns[1:])
    )
    for window, color in zip(windows, colors):
        draw.rectangle(_box(*window), tuple(color))
    picture = Image.blend(picture, layer, 0.9 if grid.points else 0.55)
    lines = ImageDraw.Draw(picture)
    for edge in grid.rows:
        lines.line((0, edge * SIDE, SIDE, edge * SIDE), LINE)
    for edge in grid.columns:
        lines.line((edge * SIDE, 0, edge * SIDE, SIDE), LINE)
    _frame(picture, attended.cell)
    return picture


def atlas_picture(layers: Sequence[Attended], chosen: tuple[int, int]) -> Image.Image:
    """Every layer from top to bottom, every head from left to right, the chosen one framed.

    The colours of each map range from its lowest weight to its highest.
    """
    most = max(len(attended.maps) for attended in layers)
    side = min(max((560 - _MARGIN) // most - _GAP, 32), 88)
    step = side + _GAP
    size = (_MARGIN + step * most, 18 + step * len(layers))
    canvas = np.full((size[1], size[0], 3), 255, np.uint8)
    for row, attended in enumerate(layers):
        for column, weights in enumerate(attended.maps):
            top, left = 18 + row * step, _MARGIN + column * step
            canvas[top : top + side, left : left + side] = _enlarged(_coloured(weights), side)
    picture = Image.fromarray(canvas)
    draw = ImageDraw.Draw(picture)
    for row in range(len(layers)):
        draw.text((4, 18 + row * step + side // 2 - 7), f"{row + 1}", "black", font=_FONT)
    for column in range(most):
        draw.text((_MARGIN + column * step + side // 2 - 4, 2), f"{column + 1}", "black", _FONT)
    top, left = 18 + chosen[0] * step, _MARGIN + chosen[1] * step
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline=CHOSEN, width=3)
    return picture


def convergence_picture(convergence: Convergence, what_if: str) -> Image.Image:
    """Residuals against the number of steps, with the layer's own inverse among them."""
    figure = Figure(figsize=(5.6, 3.7), dpi=100)
    with _matplotlib:
        ax = figure.add_axes((0.12, 0.26, 0.86, 0.66))
        for method, values in convergence.curves.items():
            _, color, line = METHODS[method]
            own = method == convergence.method
            style: Any = {"color": color, "linestyle": line, "linewidth": 3 if own else 1.2}
            ax.plot(STEPS, [_exponent(value) for value in values], label=method, **style)
        said = f"{convergence.method}, what if" if what_if else f"{convergence.method}, as trained"
        own_residual = _exponent(convergence.own)
        if convergence.method in convergence.curves:
            ax.plot(convergence.iters, own_residual, "o", color="black", label=said, clip_on=False)
        else:
            ax.axhline(own_residual, color="black", linestyle=":", label=f"{said}: no steps")
        exponents = range(-8, 1, 2)
        # Exponents on an even axis: matplotlib's logarithmic ones take four times as long.
        ax.set_yticks(exponents, [f"1e{exponent}" for exponent in exponents])
        ax.set(
            ylim=(_LOWEST, _HIGHEST),
            xlim=(1, STEPS[-1]),
            xlabel="steps",
            ylabel="|B X B \N{MINUS SIGN} B| / |B|",
            title=f"B: landmark matrix and ridge, m = {convergence.m}",
        )
        ax.grid(alpha=0.3)
        figure.legend(fontsize=9, loc="lower center", ncols=3, frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")


def _exponent(residual: float) -> float:
    """The logarithm of a residual, clipped to the axis."""
    if not math.isfinite(residual):
        return _HIGHEST
    return min(max(math.log10(residual) if residual > 0 else _LOWEST, _LOWEST), _HIGHEST)


def _to_bytes(seen: Tensor) -> np.ndarray:
    return (seen.numpy() * 255).round().astype(np.uint8)


def _coloured(weights: Tensor) -> np.ndarray:
    """(H, W) -> (H, W, 3): colours from the lowest to the highest weight, grey if not finite."""
    values = weights.detach().double().numpy()
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    scaled = np.where(finite, (values - low) / max(high - low, 1e-300), np.nan)
    return _COLORS(scaled, bytes=True)[..., :3]


def _enlarged(pixels: np.ndarray, side: int) -> np.ndarray:
    """(H, W, 3) -> (side, side, 3), every pixel a rectangle."""
    rows, columns = (np.arange(side) * length // side for length in pixels.shape[:2])
    return pixels[rows[:, None], columns]


def _grey(seen: Tensor) -> Image.Image:
    """The image (S, S, 3) in grey, as RGB."""
    return Image.fromarray(_enlarged(_to_bytes(seen), SIDE)).convert("L").convert("RGB")


def _box(top: float, left: float, bottom: float, right: float) -> tuple[float, ...]:
    return left * SIDE, top * SIDE, right * SIDE, bottom * SIDE


def _frame(picture: Image.Image, cell: tuple[float, float, float, float]) -> None:
    top, left, bottom, right = cell
    draw = ImageDraw.Draw(picture)
    x0, y0, x1, y1 = _box(*cell)
    draw.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline="black", width=1)
    draw.rectangle((x0, y0, x1, y1), outline="white", width=2)
    _cross(picture, ((top + bottom) / 2, (left + right) / 2))


def _cross(picture: Image.Image, place: tuple[float, float]) -> None:
    """White on black, visible on any colour."""
    y, x = place[0] * SIDE, place[1] * SIDE
    draw = ImageDraw.Draw(picture)
    for color, width, arm in (("black", 5, 9), ("white", 2, 8)):
        draw.line((x - arm, y, x + arm, y), color, width)
        draw.line((x, y - arm, x, y + arm), color, width)
