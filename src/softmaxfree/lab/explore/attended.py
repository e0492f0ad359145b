"""What a patch attends to in a layer, with the layer's own settings or with others."""

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...analysis.attention_record import AttentionRecord
from ...analysis.diagnosis import MOST_GROWTH
from ...analysis.factors import Factors
from ...errors import UserError
from ...layers.attention import SoftmaxFreeAttention
from ...layers.samplers import AvgSampler, RandomSampler
from ...ops.inverse import INVERSES, Inverse
from ...ops.matrices import add_ridge, eigenvalues
from ..figures.newton import METHODS, residual
from .looks import Look

MOST_WEIGHTS = 200_000_000
"""Limit for all heads of a layer that is quadratic in its tokens; their rows then take 2 GB."""

STEPS = (1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25, 30)
"""Numbers of steps of the iterations whose residuals are shown."""

ITERATIVE = tuple(method for method, (_, _, line) in METHODS.items() if line != ":")

Place = tuple[float, float]
"""A place of the image, (0, 0) to (1, 1), the height first."""


class WhatIf(NamedTuple):
    """Settings of softmax-free attention; None leaves a setting as it was trained."""

    inverse: str | None = None
    iters: int | None = None
    normalize: bool | None = None

    def __str__(self) -> str:
        """Such as "newton, 3 steps"; empty if all is as trained."""
        parts = [] if self.inverse is None else [self.inverse]
        if self.iters is not None:
            parts.append(f"{self.iters} step{'s' * (self.iters != 1)}")
        if self.normalize is not None:
            parts.append("normalised as SOFT++" if self.normalize else "not normalised, as SOFT")
        return ", ".join(parts)


AS_TRAINED = WhatIf()


def supposed(record: AttentionRecord, what_if: WhatIf) -> AttentionRecord:
    """The record of a layer with other settings; the layer itself is not changed.

    Other attentions than SOFT and SOFT++ have none of these settings, and their record is returned.
    Another inverse comes with its own ridge.
    """
    attention = record.attention
    if not isinstance(attention, SoftmaxFreeAttention) or what_if == AS_TRAINED:
        return record
    other = copy(attention)
    if what_if.inverse is not None:
        other.inverse, other.ridge = what_if.inverse, None
    if what_if.iters is not None:
        other.iters = what_if.iters
    if what_if.normalize is not None:
        other.normalize = what_if.normalize
    return replace(record, attention=other)


def factors_of(look: Look, layer: int, what_if: WhatIf = AS_TRAINED) -> Factors | None:
    """The factors of a layer with SOFT or SOFT++; None for other attentions."""
    record = look.layers[layer]
    if not isinstance(record.attention, SoftmaxFreeAttention):
        return None
    return supposed(record, what_if).factors()


class Attended(NamedTuple):
    """What a patch attends to in one layer."""

    maps: Tensor
    """(heads, H, W) of the keys: rows of the attention matrices."""
    cell: tuple[float, float, float, float]
    """The patch in units of the image: top, left, bottom, right."""
    nearness: Tensor | None
    """(heads, m), the kernel of the patch and the landmarks; None without landmarks."""


def attended(record: AttentionRecord, factors: Factors | None, place: Place) -> Attended:
    """What the patch at a place attends to.

    Args:
        record: The layer's.
        factors: The layer's, if it has SOFT or SOFT++.
        place: A place of the image.
    """
    token = record.token_at(*place)
    nearness = None if factors is None else factors.P[0, :, token]
    if factors is None:
        _check_weights(record)
    rows = record.rows([token]) if factors is None else factors.rows([token])
    height, width = record.layout.size
    row, column = divmod(token - record.attention.prefix_tokens, width)
    cell = row / height, column / width, (row + 1) / height, (column + 1) / width
    return Attended(record.on_grid(rows[0].squeeze(-2)), cell, nearness)


def _check_weights(record: AttentionRecord) -> None:
    heads, queries, keys = record.q.shape[1], record.q.shape[-2], record.k.shape[-2]
    if not record.attention.linear and heads * queries * keys > MOST_WEIGHTS:
        raise UserError(
            f"{queries:,} tokens in layer {record.name!r} are too many for rows of attention with "
            "all of its weights: choose a lower resolution"
        )


class LandmarkGrid(NamedTuple):
    """Where the landmarks of a layer come from, in units of the image."""

    rows: tuple[float, ...] = ()
    """Edges of the windows from top to bottom, from 0 to 1; empty for single tokens."""
    columns: tuple[float, ...] = ()
    """From left to right."""
    points: tuple[Place, ...] = ()
    """Single tokens; empty for windows."""

    @property
    def num_landmarks(self) -> int:
        return len(self.points) or (len(self.rows) - 1) * (len(self.columns) - 1)


def landmark_grid(record: AttentionRecord) -> LandmarkGrid | None:
    """The landmarks of SOFT or SOFT++; None for other attentions."""
    attention = record.attention
    if not isinstance(attention, SoftmaxFreeAttention):
        return None
    sampler, size = attention.sampler, record.layout.size
    height, width = size
    if isinstance(sampler, RandomSampler):
        order = sampler.order(size, torch.device("cpu"))
        picked = order.topk(sampler.count(size), largest=False).indices.tolist()
        return LandmarkGrid(
            points=tuple(((n // width + 0.5) / height, (n % width + 0.5) / width) for n in picked)
        )
    pooled = isinstance(sampler, AvgSampler) and sampler.num_landmarks is not None
    windows = size if pooled else sampler.grid(size)
    counts = windows if sampler.num_landmarks is None else sampler.bins(windows)
    rows, columns = (
        tuple(
            # A window that sticks out of the image ends at its edge.
            min(i * number / count * (1 if windows == size else sampler.ratio) / side, 1.0)
            for i in range(count + 1)
        )
        for side, number, count in zip(size, windows, counts)
    )
    return LandmarkGrid(rows, columns)


class Convergence(NamedTuple):
    """Residuals |B X B - B| / |B| of the inverses, with B = A plus a ridge."""

    m: int
    curves: dict[str, list[float]]
    """By iterative method, after `STEPS` steps."""
    own: float
    """The residual of the inverse that the layer computes."""
    method: str
    """The layer's."""
    iters: int
    """The layer's; direct methods have no steps."""


def convergence_of(record: AttentionRecord, factors: Factors, head: int) -> Convergence:
    """The convergence in one head, in the layer's own precision.

    Args:
        record: Of the layer, with the settings in question.
        factors: Its factors.
        head: Counted from 0.
    """
    attention = record.attention
    assert isinstance(attention, SoftmaxFreeAttention)
    a = factors.A[0, head]
    curves = {}
    for method in ITERATIVE:
        own_ridge = attention.ridge if method == attention.inverse else None
        ridge = Inverse.checked(method, ridge=own_ridge).ridge
        inverted = add_ridge(a, ridge)
        with torch.no_grad():
            curves[method] = [
                residual(inverted, INVERSES[method](a, steps, ridge)).item() for steps in STEPS
            ]
    own = residual(add_ridge(a, attention.inversion.ridge), factors.A_inverse[0, head]).item()
    return Convergence(a.shape[-1], curves, own, attention.inverse, attention.iters)


def strength(factors: Factors) -> float:
    """|A Z A| of a layer, the mean of its heads, see `diagnose`."""
    product = factors.A @ factors.Z @ factors.A
    if not product.isfinite().all():
        return math.inf
    return eigenvalues(product).abs().amax(-1).mean().item()


def resolution_warning(growths: Iterable[float], side: int, trained: int) -> str:
    """Warns if attention is much stronger or weaker than at the training size; empty if it is not.

    Args:
        growths: The strength of every layer in units of that at the training size.
        side: The size of the image.
        trained: The training size.
    """
    growths = list(growths)
    outside = [growth for growth in growths if not 1 / MOST_GROWTH <= growth <= MOST_GROWTH]
    if not outside:
        return ""
    return (
        f"At {side} pixels attention is {min(outside):.2g} to {max(outside):.2g} times as "
        f"strong as at {trained}, where the model was trained, in {len(outside)} of "
        f"{len(growths)} layers (by |A Z A|): do not trust the prediction."
    )
