"""What a patch attends to in a layer, with the layer's own settings or with others."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...analysis.attention_record import AttentionRecord
from ...analysis.factors import Factors
from ...errors import UserError
from ...layers.attention import SoftmaxFreeAttention
from ...layers.samplers import AvgSampler, RandomSampler
from ...ops.matrices import add_ridge
from ..figures.newton import METHODS, residual, residuals
from .looks import Look

MOST_WEIGHTS = 200_000_000
"""Limit for all heads of a layer that is quadratic in its tokens; their rows then take 2 GB."""

STEPS = (1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25, 30)
"""Numbers of steps of the iterations whose residuals are shown."""

OWN = "this layer"

ITERATIVE = tuple(method for method, (_, _, line) in METHODS.items() if line != ":")

Place = tuple[float, float]
"""A place of the image, (0, 0) to (1, 1), the height first."""

Box = tuple[float, float, float, float]
"""Top, left, bottom and right, in units of the image."""


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


def inverts(record: AttentionRecord) -> bool:
    """Whether a layer inverts a landmark matrix, as SOFT and SOFT++ do."""
    attention = record.attention
    return isinstance(attention, SoftmaxFreeAttention) and attention.middle == "inverse"


def supposed(record: AttentionRecord, what_if: WhatIf) -> AttentionRecord:
    """The record of a layer with other settings; the layer itself is not changed.

    Attentions that invert nothing have none of these settings, and their record is returned.
    Another inverse comes with its own ridge.
    """
    if not inverts(record) or what_if == AS_TRAINED:
        return record
    other: Any = copy(record.attention)
    if what_if.inverse is not None:
        other.ridge = None
    for name, value in what_if._asdict().items():
        if value is not None:
            setattr(other, name, value)
    return replace(record, attention=other)


def factors_of(look: Look, layer: int, what_if: WhatIf = AS_TRAINED) -> Factors | None:
    """The factors of a layer with SOFT, SOFT++ or softx; None for other attentions."""
    record = look.layers[layer]
    if not isinstance(record.attention, SoftmaxFreeAttention):
        return None
    return supposed(record, what_if).factors()


class Attended(NamedTuple):
    """What a patch attends to in one layer."""

    maps: Tensor
    """(heads, H, W) of the keys: rows of the attention matrices."""
    cell: Box
    """The patch."""
    nearness: Tensor | None
    """(heads, m), the patch's row of P, of the landmarks on the grid; None without landmarks."""


def attended(record: AttentionRecord, factors: Factors | None, place: Place) -> Attended:
    """What the patch at a place attends to.

    Args:
        record: The layer's.
        factors: The layer's, if it has some.
        place: A place of the image.
    """
    token, prefix = record.token_at(*place), record.attention.prefix_tokens
    cell = _cell(token - prefix, record.layout.size)
    if factors is not None:
        maps = record.on_grid(factors.rows([token])[0].squeeze(-2))
        landmarks = slice(prefix, prefix + len(landmark_boxes(record)))
        return Attended(maps, cell, factors.P[0, :, token, landmarks])
    heads, queries, keys = record.q.shape[1], record.q.shape[-2], record.k.shape[-2]
    if not record.attention.linear and heads * queries * keys > MOST_WEIGHTS:
        raise UserError(
            f"{queries:,} tokens in layer {record.name!r} are too many for rows of attention with "
            "all of its weights: choose a lower resolution"
        )
    return Attended(record.on_grid(record.rows([token])[0].squeeze(-2)), cell, None)


def _cell(number: int, size: Sequence[int]) -> Box:
    """The place of a token of the grid."""
    height, width = size
    row, column = divmod(number, width)
    return row / height, column / width, (row + 1) / height, (column + 1) / width


def landmark_boxes(record: AttentionRecord) -> list[Box]:
    """Where landmarks come from: windows, or tokens; empty for attentions without factors."""
    attention, size = record.attention, record.layout.size
    if not isinstance(attention, SoftmaxFreeAttention):
        return []
    sampler = attention.sampler
    if isinstance(sampler, RandomSampler):
        order = sampler.order(size, torch.device("cpu"))
        picked = order.topk(sampler.count(size), largest=False).indices.tolist()
        return [_cell(number, size) for number in picked]
    pooled = isinstance(sampler, AvgSampler) and sampler.num_landmarks is not None
    windows = size if pooled else sampler.grid(size)
    counts = windows if sampler.num_landmarks is None else sampler.bins(windows)
    rows, columns = (
        [
            # A window that sticks out of the image ends at its edge.
            min(i * number / count * (1 if windows == size else sampler.ratio) / side, 1.0)
            for i in range(count + 1)
        ]
        for side, number, count in zip(size, windows, counts)
    )
    return [
        (top, left, bottom, right)
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]


def convergence_of(record: AttentionRecord, factors: Factors, head: int) -> list[dict[str, Any]]:
    """Residuals |B X B - B| / |B| of the iterations in one head, with B = A plus a ridge.

    In the layer's own precision; the residual of the inverse that the layer computes is a level
    line of its own. Of each residual there is the decimal exponent, from -9 to 1.

    Args:
        record: Of the layer, with the settings in question.
        factors: Its factors.
        head: Counted from 0.
    """
    attention = record.attention
    assert isinstance(attention, SoftmaxFreeAttention)
    assert factors.A is not None
    assert factors.A_inverse is not None
    a, x = factors.A[0, head], factors.A_inverse[0, head]
    own = residual(add_ridge(a, attention.inversion.ridge), x)
    curves = {OWN: own.expand(len(STEPS))}
    for method in ITERATIVE:
        ridge = attention.ridge if method == attention.inverse else None
        curves[method] = residuals(method, a, STEPS, ridge)
    return [
        {"method": method, "steps": steps, "exponent": exponent}
        for method, values in curves.items()
        for steps, exponent in zip(STEPS, values.log10().nan_to_num(1).clamp(-9, 1).tolist())
    ]
